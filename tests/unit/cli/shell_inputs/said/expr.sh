A=3
trl --lr $(expr $A + 4) "`expr $A \* 2`" $(basename /a/b/c) n$(echo a  b)m
