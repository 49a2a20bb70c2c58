: ${A:=5} ${B:="x y"}
trl $A $B "$B"
