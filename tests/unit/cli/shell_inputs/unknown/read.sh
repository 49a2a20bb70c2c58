echo 1 2 | { read A B; trl $A $B; }
read C <<< word
trl $C
