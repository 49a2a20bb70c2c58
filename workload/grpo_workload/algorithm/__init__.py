"""The arithmetic of GRPO, without models: advantages, loss, and a step's samples as micro-batches on every rank."""
