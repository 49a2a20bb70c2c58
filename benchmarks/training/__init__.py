"""Single parts of a training step."""
