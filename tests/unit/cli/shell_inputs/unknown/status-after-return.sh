f() { [ -d / ] && return; false; }
if f; then trl yes; else trl no; fi
