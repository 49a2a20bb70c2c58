"""`make demo`: from an empty machine to a model that has learned, with everything shown on the way."""
