false || trl a
true && trl b
! true || trl c
! false && trl d
if ! false; then trl e; fi
