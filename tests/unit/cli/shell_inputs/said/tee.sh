set -x
mkdir -p logs
trl a --b 1 2>&1 | tee logs/x.log
trl c > out.txt 2> err.txt < /dev/null
