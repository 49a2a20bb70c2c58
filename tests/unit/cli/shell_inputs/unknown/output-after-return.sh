f() { [ -d / ] && return 0; echo x; }
A=$(f)
trl "a$A"
