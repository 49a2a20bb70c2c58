"""Bytes of a job, by part, phase and rank, before a GPU is asked for: what fits, and the one edit that makes it fit."""
