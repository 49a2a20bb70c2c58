"""LoRA adapters, their weights, and the frozen weights below them in 4 bits."""
