for i in 1 2 3; do [ $i = 2 ] && continue; A+=" $i"; done
for ((i = 0; i < 3; i++)); do B+=$i; done
while [ $i -gt 1 ]; do i=$((i - 1)); done
until ((i >= 4)); do ((i++)); if ((i == 3)); then break; fi; done
trl $A $B $i
