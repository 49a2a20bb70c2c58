"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1), as TRL 1.16 computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def group_advantages(rewards: Tensor | Sequence[float], num_generations: int, scale_rewards: Literal["group", "batch", "none"]) -> Tensor:
    """Advantages [N] (float32) of rewards [N] of the whole step over all ranks, the completions of a prompt side by side.

    reward minus the group's mean, divided by std + 1e-4 of the group (`group`), of all rewards (`batch`), or by nothing (`none`).
    NaN rewards are left out of means and deviations and get advantage 0.
    """
    raise NotImplementedError
