"""Checks that need more than the spec: other ranks' folders, another run's checkpoint, and rewards' time limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig
from grpo_spec.words import counted
from grpo_workload.data.origin import DataOrigin
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import Reward
from grpo_workload.storage.base_model import Origin, fingerprint
from grpo_workload.storage.resuming import Source


def check_folders(model: ModelConfig, origin: Origin, rank: int) -> None:
    """Raise ConfigError unless every rank finds in model.path the weights that rank 0 found there; collective."""
    found = gather(origin.fingerprint if model.path is None or rank == 0 else fingerprint(Path(model.path)))
    if others := [rank for rank, one in enumerate(found) if one != origin.fingerprint]:
        raise ConfigError(
            f"model.path: ranks {', '.join(map(str, others))} find other weights in {model.path} than rank 0; every "
            "trainer pod must mount the same volume there, and nothing may write to it while the job starts"
        )


def check_rows(field: str, found: Sequence[DataOrigin], contract: Contract) -> None:
    """Raise ConfigError unless every rank has found the rows that rank 0 found; `found` is in rank order."""
    others = {rank: difference for rank, one in enumerate(found) if (difference := one.difference(found[0]))}
    if not others:
        return
    told = "; ".join(
        f"rank {rank} (pod {member.pod}): {others[rank]}"
        for member in contract.members
        for rank in range(member.rank_offset, member.rank_offset + member.gpus)
        if rank in others
    )
    raise ConfigError(
        f"{field}: ranks find other rows in {found[0].source} than rank 0 (pod {contract.master.pod}): {told}. Every "
        "trainer pod must read the same files, and nothing may write to them while the job starts"
    )


def check_steps_left(resumed: Source | None, max_steps: int) -> None:
    """Raise ConfigError for another run's checkpoint after which no step is left; after one's own, the job is done."""
    if resumed is not None and not resumed.is_own and resumed.state.step >= max_steps:
        raise ConfigError(
            f"training.maxSteps: {counted(max_steps, 'step leaves', 'steps leave')} none to take: the checkpoint "
            f"that storage.resumeFrom leads to was saved after step {resumed.state.step}, and its steps count; "
            "set maxSteps to more than that"
        )


def check_patience(rewards: Sequence[Reward], timeout_seconds: int) -> None:
    """Raise ConfigError for a reward whose time limit is longer than ranks wait for each other."""
    for reward in rewards:
        if reward.timeout_seconds > timeout_seconds:
            raise ConfigError(
                f"rewards[{reward.name}].timeoutSeconds: {reward.timeout_seconds:g} is more than the {timeout_seconds} "
                f"s that ranks wait for each other; use at most {timeout_seconds}, or raise rendezvous.timeoutSeconds"
            )
