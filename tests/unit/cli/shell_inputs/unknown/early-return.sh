f() { A=1; [ -e /no ] && return; A=2; }
f
trl $A
