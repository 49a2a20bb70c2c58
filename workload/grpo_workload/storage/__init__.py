"""A run's files on the storage: checkpoints, the journal, and the fence that lets one attempt write."""
