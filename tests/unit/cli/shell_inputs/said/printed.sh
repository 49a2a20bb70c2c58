f() { echo log >&2; echo "$1-x"; echo y; }
X=$(f a)
trl "$X" $X $(f b)
