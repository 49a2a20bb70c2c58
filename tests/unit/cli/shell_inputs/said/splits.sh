A=' a  b '
trl $A x$A"$A"x ${A}y z$A
