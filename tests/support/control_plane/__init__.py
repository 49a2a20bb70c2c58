"""Jobs and passes of the operator's pure core, and the operator as a process on a real API server."""
