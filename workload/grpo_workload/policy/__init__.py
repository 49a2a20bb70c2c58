"""The policy, which DeepSpeed trains: model, kernels, log-probabilities, LoRA adapters, and offload to host memory."""
