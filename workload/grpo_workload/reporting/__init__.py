"""What a run reports: metrics, progress, samples of its text, and experiment trackers."""
