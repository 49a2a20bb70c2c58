"""Reads manifests as kubectl does, and checks the jobs in them."""
