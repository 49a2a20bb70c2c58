"""The loss of a micro-batch as a job sets it."""
