"""The policy, which DeepSpeed trains, in rooms of their own order: see `rooms of the policy` in pyproject.toml."""
