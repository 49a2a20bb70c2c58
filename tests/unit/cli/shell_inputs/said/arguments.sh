trl a "$@" $* b $#
