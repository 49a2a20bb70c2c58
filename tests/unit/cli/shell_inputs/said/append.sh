A=a
A+=b
A+=$A
B+=new
trl $A $B
L=(x y)
L+=z
trl "${L[@]}"
