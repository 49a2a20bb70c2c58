"""What `grpo convert` makes of other trainers' examples."""
