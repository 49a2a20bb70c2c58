"""Passes over jobs: look, plan, write the status, change children."""
