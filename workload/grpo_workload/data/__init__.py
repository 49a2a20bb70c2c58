"""Prompts of a step, made of a dataset: rows, the user's preprocessing, templates, tokens, and worker processes."""
