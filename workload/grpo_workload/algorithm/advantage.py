"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1), as TRL 1.16 computes them.

Shapes: F prompt groups (one for each prompt of the step), G completions of a prompt (`num_generations`), N = F * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]

_EPS = 1e-4  # TRL's value; it makes a group of equal rewards give 0 and not 0/0


def group_advantages(rewards: Tensor | Sequence[float], num_generations: int, scale_rewards: ScaleRewards) -> Tensor:
    """Compute the advantages [N] (float32) from the rewards [N] of the whole step, over all ranks.

    Rewards of a prompt are adjacent. The advantage is the reward minus the mean of its prompt group, divided by
    std + 1e-4. `scale_rewards` says which std: the prompt group's (`group`), that of all rewards (`batch`), or no
    division at all (`none`). Means and deviations ignore NaN rewards. A NaN reward gets advantage 0, and so does a
    reward that is the only number in its group.
    """
    rewards_FG = as_groups(rewards, num_generations)
    advantages_FG = rewards_FG - rewards_FG.nanmean(dim=1, keepdim=True)
    if scale_rewards != "none":
        advantages_FG = advantages_FG / (reward_std(rewards_FG, scale_rewards).unsqueeze(1) + _EPS)
    return advantages_FG.nan_to_num(nan=0.0).float().flatten()


def as_groups(rewards: Tensor | Sequence[float], num_generations: int) -> Tensor:
    """Reshape rewards [N] to [F, G]. In float64: squares of rewards that float32 holds overflow float32."""
    rewards_N = torch.as_tensor(rewards, dtype=torch.float64)
    assert rewards_N.numel() % num_generations == 0, (
        f"{rewards_N.numel()} rewards are not whole prompt groups of {num_generations}"
    )
    return rewards_N.view(-1, num_generations)


def reward_std(rewards_FG: Tensor, scale_rewards: ScaleRewards) -> Tensor:
    """Standard deviation [F] for each prompt group: of its own rewards, or of all rewards with `batch`."""
    if scale_rewards == "batch":
        return nanstd(rewards_FG.reshape(1, -1)).expand(rewards_FG.size(0))
    return nanstd(rewards_FG)


def nanstd(values_FG: Tensor) -> Tensor:
    """Sample standard deviation [F] (Bessel's correction) of each row, ignoring NaN; NaN for fewer than two numbers."""
    count_F = (~values_FG.isnan()).sum(dim=1)
    squares_F = (values_FG - values_FG.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
    return torch.where(count_F > 1, squares_F / (count_F - 1), torch.nan).sqrt()
