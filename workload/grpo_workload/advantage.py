"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1), as TRL 1.16 computes them.

Shapes: N completions of a step, F prompts (groups), G generations of a prompt; N = F * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]

_EPS = 1e-4  # TRL's, so that a group of equal rewards gives 0 rather than 0/0


def group_advantages(rewards: Tensor | Sequence[float], num_generations: int, scale_rewards: ScaleRewards) -> Tensor:
    """Advantages [N] (float32) of rewards [N] of the whole step over all ranks, the completions of a prompt side by side.

    reward minus the group's mean, divided by std + 1e-4 of the group (`group`), of all rewards (`batch`), or by nothing (`none`).
    NaN rewards are left out of means and deviations and get advantage 0, and so does a reward that is alone in its group.
    """
    rewards_FG = as_groups(rewards, num_generations)
    advantages_FG = rewards_FG - rewards_FG.nanmean(dim=1, keepdim=True)
    if scale_rewards != "none":
        advantages_FG = advantages_FG / (reward_std(rewards_FG, scale_rewards).unsqueeze(1) + _EPS)
    return advantages_FG.nan_to_num(nan=0.0).flatten()


def as_groups(rewards: Tensor | Sequence[float], num_generations: int) -> Tensor:
    """Rewards [N] as float32 [F, G]."""
    rewards_N = torch.as_tensor(rewards, dtype=torch.float32)
    assert rewards_N.numel() % num_generations == 0, f"{rewards_N.numel()} rewards are not whole groups of {num_generations}"
    return rewards_N.view(-1, num_generations)


def reward_std(rewards_FG: Tensor, scale_rewards: ScaleRewards) -> Tensor:
    """Deviation [F] that belongs to each group: its own, or with `batch` that of all rewards."""
    if scale_rewards == "batch":
        return nanstd(rewards_FG.reshape(1, -1)).expand(rewards_FG.size(0))
    return nanstd(rewards_FG)


def nanstd(values_FG: Tensor) -> Tensor:
    """Sample deviation [F] (Bessel's correction) of each row without its NaN; NaN where fewer than two are left."""
    count_F = (~values_FG.isnan()).sum(dim=1)
    squares_F = (values_FG - values_FG.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
    return torch.where(count_F > 1, squares_F / (count_F - 1), torch.nan).sqrt()
