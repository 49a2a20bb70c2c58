"""Reports of a run: metrics, progress, samples of its text, and experiment trackers."""
