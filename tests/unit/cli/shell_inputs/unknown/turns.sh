A=1 B=1 C=1
for i in $(echo 1 | cat) $(cat nope) 3; do A=$B; B=$C; C=5; continue; done
trl $A $B $C
