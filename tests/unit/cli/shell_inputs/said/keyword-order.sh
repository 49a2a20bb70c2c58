FLAGS="--a 1 --b"
FLAGS="$FLAGS 2"
swift rlhf $FLAGS \
  --c="$((1024 * 2))" --d 'x y'
