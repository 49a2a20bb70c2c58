"""Seeds derived from the run's seed and the step, and from the prompt or the rank. Torch-free and pure.

What is sampled depends on no rank: a run that resumes with another number of ranks draws the same completions.
"""

from __future__ import annotations

import numpy as np


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of python, numpy and torch on `rank` during `step`, for rewards and dropout: 32 bits.

    Each rank has its own: with the same dropout masks everywhere, ranks would train on fewer different ones.
    """
    return int(np.random.SeedSequence([seed, step], spawn_key=(rank,)).generate_state(1)[0])


def reward_seed(seed: int, name: str) -> int:
    """Return the seed of the process of the reward `name`, from that of its rank and step: 32 bits.

    With the same one, functions that add noise or pick completions by chance would agree on them.
    """
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0])


def prompt_seed(seed: int, step: int, position: int) -> int:
    """Return the seed for sampling completions of the prompt at `position` among the prompts of `step` on all ranks.

    It has 62 bits, which vLLM's servers accept. vLLM samples the n completions of a request with seed + 0 ... n - 1.
    """
    return int(np.random.SeedSequence([seed, step, position]).generate_state(1, np.uint64)[0]) >> 2


def sample_seed(seed: int, number: int, num_tokens: int) -> int:
    """Return the seed for sampling the rest of a completion that has `num_tokens` tokens, 0 at its beginning.

    A continuation that began with the same seed again would repeat random numbers, and favour the same tokens.

    Args:
        seed: seed of its prompt.
        number: its number among the prompt's completions.
        num_tokens: number of tokens that it has.
    """
    return int(np.random.SeedSequence(seed, spawn_key=(number, num_tokens)).generate_state(1, np.uint64)[0]) >> 2
