trl a
exit 1
trl never
