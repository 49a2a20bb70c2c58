"""Neighbouring ranks that share each sequence (`parallelism.sequence`): they train on the same micro-batches.

Each rank of a group is fed a part of their tokens, and computes the attention of a part of the heads.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from grpo_spec.errors import ConfigError


class SequenceGroup(NamedTuple):
    """The group that this rank is in."""

    handle: Any  # torch's process group
    place: int  # of this rank in it
    size: int  # number of its ranks, at least 2

    @property
    def is_first(self) -> bool:
        """Whether this rank counts what all ranks of the group have alike."""
        return self.place == 0


def join_group(size: int, timeout_seconds: int) -> SequenceGroup | None:
    """Return the group of this rank, None for groups of one; collective.

    Raises:
        ConfigError: ranks cannot be divided into groups of `size`.
    """
    if size == 1:
        return None
    check_size(size, dist.get_world_size())
    own, place = divmod(dist.get_rank(), size)
    # Every rank has to take part in making every group; the deadline is not that of the ranks' own group by itself.
    deadline = timedelta(seconds=timeout_seconds)
    handles = [
        dist.new_group(list(range(first, first + size)), timeout=deadline)
        for first in range(0, dist.get_world_size(), size)
    ]
    return SequenceGroup(handles[own], place, size)


def check_size(size: int, world_size: int) -> None:
    """ConfigError if `world_size` ranks cannot be divided into groups of `size`; it names a size that would work."""
    if world_size % size:
        works = max(one for one in range(1, size) if world_size % one == 0)
        raise ConfigError(
            f"parallelism.sequence: {size} does not divide the {world_size} ranks that train; {works} would work"
        )
