"""What a run keeps on the storage: checkpoints, the journal, and the fence that lets one attempt write."""
