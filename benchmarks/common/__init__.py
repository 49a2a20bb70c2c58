"""Shared by several benchmarks: models, lengths, jobs, processes."""
