"""Shared by trainer and engine pods: reading the contract, running once, vLLM servers. May import `spec`, no torch."""
