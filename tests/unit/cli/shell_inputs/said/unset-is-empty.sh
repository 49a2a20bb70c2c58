if [ -z "$DEBUG" ]; then A=1; else A=2; fi
[ "$RUN" == x ] && A=3
[[ -n ${V:-} ]] || B=4
trl $A $B
