"""The transformers model: loaded, its attention, images, routers and RoPE, and its weights' names in a checkpoint."""
