"""Comparisons with TRL's GRPOTrainer."""
