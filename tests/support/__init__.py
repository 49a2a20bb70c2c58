"""Shared by tests: builders of jobs and worlds, the real programs they run against, and paths of this repository."""
