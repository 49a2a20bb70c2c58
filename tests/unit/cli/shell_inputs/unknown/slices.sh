A=abcdef
B=A
trl ${A:1:2} ${!B} ${A/b*/x}
