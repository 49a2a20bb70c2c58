A=$(echo x | cat)
B=$(false || cat < /dev/null)
trl "$A" "$B"
