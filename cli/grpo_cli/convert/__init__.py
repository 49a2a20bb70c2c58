"""`grpo convert`: configurations of other trainers as a GRPOJob, with what maps, what maps differently, and what does not."""
