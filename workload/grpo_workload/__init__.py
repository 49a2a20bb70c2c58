"""The part of grpo-operator that runs in a job's pods: launcher, trainer and generation."""
