f() { return 1; }
A=$(f) && B=1
if A=$(f); then C=1; else C=2; fi
N=$(echo 3)
trl "$A" $B $C $N
