L=($UNSET 1)
case ${L[@]} in 1) A=one;; *) A=other;; esac
set -- $UNSET x
[ "$1" = x ] && B=x
trl $A $B
