f() { local X; X=2; declare Y=3; Z=4; }
X=1
f
trl $X ${Y:-none} $Z
