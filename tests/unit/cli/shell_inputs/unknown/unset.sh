trl --model $MODEL --x "$X/y" ${Y} --last 1
