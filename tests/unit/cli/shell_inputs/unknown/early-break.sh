A=0
for i in 1 2 3; do A=$i; if [ -e /no ]; then break; fi; done
trl $A $i
