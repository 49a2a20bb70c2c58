"""Code that runs inside vLLM's workers: it receives weights and adapters."""
