"""`grpo`, also `kubectl grpo`: what a person runs beside the cluster."""
