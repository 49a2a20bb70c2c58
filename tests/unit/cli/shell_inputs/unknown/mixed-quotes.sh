trl --out "run-$(date +%s)" "a $(hostname) b"
