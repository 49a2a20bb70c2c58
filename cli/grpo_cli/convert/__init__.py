"""`grpo convert`: a GRPOJob from configurations of other trainers, and what became of each option."""
