"""What several benchmarks share: models, lengths, jobs, processes."""
