if [[ abc =~ b ]]; then A=1; else A=2; fi
trl $A
