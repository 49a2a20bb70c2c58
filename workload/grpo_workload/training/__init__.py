"""The training loop of a rank: it loads what a job trains with, and runs the steps."""
