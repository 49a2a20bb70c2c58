"""Tiny models, worlds of launchers and ranks, and real engines."""
