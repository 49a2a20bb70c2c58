export A=1 B='x y'
export "C=$A 2"
declare -x D=4
readonly E=5
trl $A "$B" "$C" $D $E
