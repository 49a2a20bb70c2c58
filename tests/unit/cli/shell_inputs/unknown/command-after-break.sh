for i in 1 2; do [ -d / ] && break; trl $i; done
f() { [ -d / ] && return; trl inside; }
f
trl after
