"""`grpo`, also `kubectl grpo`: the command line for jobs in a cluster and on this machine."""
