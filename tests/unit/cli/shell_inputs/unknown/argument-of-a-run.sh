trl $0 $$ $RANDOM
