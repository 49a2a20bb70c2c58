"""`grpo ui`: a local, read-only page of a job or of a run's folder."""
