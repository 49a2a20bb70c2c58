trl ${C:-a b} "${C:-a b}" ${C:-"a b" c} x${C:-a b}y
