N=2
if [ $N -gt 1 ] && [[ $N != 3 ]]; then A=many; elif [ -z "$N" ]; then A=none; else A=one; fi
trl $A
[[ $A == m* ]] && trl yes
[ "$A" = many -o x = y ] || true
test ! -n "" && trl ok
