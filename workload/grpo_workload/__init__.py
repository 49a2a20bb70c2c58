"""The in-container half of grpo-operator: launcher, trainer and generation."""
