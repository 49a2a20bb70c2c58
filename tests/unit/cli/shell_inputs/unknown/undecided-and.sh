A=1
[ -d /no ] && A=2
[ -d / ] && B=2
trl $A $B
