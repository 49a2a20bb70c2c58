"""The model's weights: exported, cut into buckets, packed for the network. May import torch, DeepSpeed and `spec`."""
