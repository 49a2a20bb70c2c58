if [ -f /no/such ]; then trl a; else trl b; fi
trl c
