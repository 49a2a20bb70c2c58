trl {a,b} x{1..3} a
