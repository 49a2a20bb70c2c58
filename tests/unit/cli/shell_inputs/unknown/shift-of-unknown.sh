set -- $(hostname) b
shift
trl $1
