"""Shell scripts, evaluated over the syntax tree of shfmt and never run; what only a run can tell becomes a mark."""
