"""What trainer and engine pods share: reading the contract, running once, vLLM servers. May import `spec`, no torch."""
