case $(uname) in Linux) A=1;; *) A=2;; esac
trl $A
