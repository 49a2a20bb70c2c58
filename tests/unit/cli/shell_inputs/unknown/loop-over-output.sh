N=0
for x in $(hostname); do N=$((N + 1)); done
trl $N
