"""Other trainers' examples, as `grpo convert` takes them over."""
