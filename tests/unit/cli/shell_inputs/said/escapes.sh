trl $'a\tb\'c' a\ b
