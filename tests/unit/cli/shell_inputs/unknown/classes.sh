A=x1
case $A in [[:alpha:]]1) B=1;; *) B=2;; esac
trl $B
