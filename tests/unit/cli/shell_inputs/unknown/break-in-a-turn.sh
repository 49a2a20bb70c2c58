for i in a$X b; do trl $i; break; done
A=1 B=1
for i in $(echo 1 | cat) $(cat nope) ; do A=$B; B=5; done
trl $A $B
