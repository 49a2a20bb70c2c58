"""Measures what the trainer leaves of a GPU while a colocated engine generates, before that engine is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.micro_batch import filler
from grpo_workload.policy.memory.spare import COMMUNICATOR, gather_buckets, reserve
from grpo_workload.policy.step.policy import Policy
from grpo_workload.policy.trials.memory_trial import GIB, missing_moments
from grpo_workload.ranks.collectives import gather


def engine_room(policy: Policy, *, is_split: bool) -> int:
    """Return the bytes that an engine may take of this rank's GPU: the least of all ranks; collective.

    Passes over two tokens come first, whose gradients are dropped: what all steps allocate once exists then, and so
    does what stays when they end.

    Raises:
        SequenceMemoryError: not even they fit.
        ConfigError: they leave nothing on some rank.
    """
    policy.rehearse(iter([filler()]), 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    buckets = gather_buckets(_largest(policy), is_partitioned=policy.is_partitioned)
    return agree(gather(free - missing_moments(policy) - reserve(total, buckets) - is_split * COMMUNICATOR))


def agree(rooms: Sequence[int]) -> int:
    """Return the least of all ranks' rooms. ConfigError if one of them has none."""
    if (least := min(rooms)) <= 0:
        raise ConfigError(
            f"generation: what training keeps of the GPU leaves no memory for vLLM ({-least / GIB:.1f} GiB are lacking "
            "beside a reserve); parallelism.offloadOptimizer generating, parallelism.zeroStage 3 or more GPUs may help"
        )
    return least


def _largest(policy: Policy) -> int:
    """Bytes of the largest weight, on all ranks together."""
    sizes: list[int] = [
        getattr(one, "ds_numel", one.numel()) * one.element_size() for one in policy.module.parameters()
    ]
    return max(sizes)
