"""`grpo ui`: a local page that shows a job, or a run's folder, and changes nothing."""
