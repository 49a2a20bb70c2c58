"""Sampling of completions: vLLM next to or inside the ranks, or plain `generate()`."""
