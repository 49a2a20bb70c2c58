trl --lr $(cat file) --b 2 x$(date)y
