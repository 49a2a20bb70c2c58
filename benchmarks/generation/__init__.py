"""Tokens per second of sampling."""
