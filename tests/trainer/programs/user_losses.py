"""Functions for training.loss."""

import torch


def ppo(log_probs, old_log_probs, advantages):
    """PPO's loss, and how far ratios are from 1."""
    ratios = (log_probs - old_log_probs).exp()
    return -torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages), {"distance": (ratios - 1).abs()}
