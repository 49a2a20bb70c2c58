trl $((N + 1))
