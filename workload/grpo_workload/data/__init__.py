"""From a dataset to the prompts of a step: rows, the user's preprocessing, templates, tokens, and worker processes."""
