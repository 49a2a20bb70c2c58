"""The ranks' side of vLLM servers: prompts out, completions back, weights pushed, and a watch over the engines."""
