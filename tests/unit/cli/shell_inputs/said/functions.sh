f() { local x=in; y=$1; trl $x $y "$@"; return 0; trl never; }
x=out
f a 'b c' && trl $x $y
g() { f "$2"; }
X=1 g q r
