"""Code that runs inside vLLM's processes: it receives weights and adapters, and spares its HTTP server work."""
