A=1
unset A
trl ${A:-gone}
