A=1
A=2 trl $A
A=3 B=$A trl $A
trl $A
