if [ ! -z "$A" ]; then trl a; else trl b; fi
[[ ! ( a == b ) && -z '' ]] && trl c
