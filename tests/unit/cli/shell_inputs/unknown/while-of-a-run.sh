N=1
while [ -e /no ]; do N=2; sleep 1; done
until [ -e / ]; do N=3; done
trl $N
