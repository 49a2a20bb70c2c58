"""Seeds derived from the run's seed, the step and the prompt, but not the rank. Torch-free and pure.

A run that resumes with another number of ranks draws the same random numbers.
"""

from __future__ import annotations

import numpy as np


def step_seed(seed: int, step: int) -> int:
    """Return the seed of python, numpy and torch on all ranks during `step`, for rewards and layers: 32 bits."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def prompt_seed(seed: int, step: int, position: int) -> int:
    """Return the seed for sampling completions of the prompt at `position` among the prompts of `step` on all ranks.

    It has 62 bits, which vLLM's servers accept. vLLM samples the n completions of a request with seed + 0 ... n - 1.
    """
    return int(np.random.SeedSequence([seed, step, position]).generate_state(1, np.uint64)[0]) >> 2
