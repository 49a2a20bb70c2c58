A=(a b)
if [ -d /no ]; then A+=(c); fi
trl "${A[@]}"
