"""For every rank: variables, process group, seeds, clock. May import torch, DeepSpeed, `weights` and `spec`."""
