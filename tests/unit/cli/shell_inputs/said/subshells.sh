A=1
(A=2; trl $A)
{ A=3; }
trl $A | cat
echo x | A=4
trl $A &
wait
