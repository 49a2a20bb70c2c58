if command -v nope; then A=1; B=2; else A=3; B=2; fi
trl $A $B
