"""`make demo`: from an empty machine to a model that has learned; every step on the way is shown."""
