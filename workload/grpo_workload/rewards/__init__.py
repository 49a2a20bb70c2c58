"""Rewards of completions: built-in ones, and users' functions in processes with limits."""
