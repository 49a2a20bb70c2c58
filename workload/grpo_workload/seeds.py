"""Random numbers keyed by the run's seed, the step and the prompt, and by no rank: a run that goes on with another number of ranks draws
what it would have drawn. Torch-free and pure.
"""

from __future__ import annotations

import numpy as np


def step_seed(seed: int, step: int) -> int:
    """Seed of python, numpy and torch on every rank during `step`, for what rewards and layers draw; 32 bits."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def prompt_seed(seed: int, step: int, position: int) -> int:
    """Seed of the completions sampled for the prompt at `position` among those of `step`, over all ranks.

    62 bits, as vLLM's servers take; vLLM gives the n samples of a request this seed + 0 ... n - 1.
    """
    return int(np.random.SeedSequence([seed, step, position]).generate_state(1, np.uint64)[0]) >> 2
