set -- a 'b c' d
shift
trl "$@" $# "$1" ${2}
for x; do trl $x; done
