"""The commands of `grpo`."""
