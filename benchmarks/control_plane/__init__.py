"""The operator under load, on a real control plane with fake nodes."""
