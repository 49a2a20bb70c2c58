"""Benchmarks of rewards: answers that are paid."""
