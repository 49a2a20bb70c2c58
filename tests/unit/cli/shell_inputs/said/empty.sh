A=
trl $A "$A" $A$A ""$A
