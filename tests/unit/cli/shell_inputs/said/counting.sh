I=1
((I++))
((I+=3))
let J=I*2
trl $I $J $((I++)) $I $((++I))
