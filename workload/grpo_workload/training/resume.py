"""The checkpoint that an attempt resumes from, and what the run began with: its base model and its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.origin import DataOrigin, pin, settle_data
from grpo_workload.ranks.collectives import gather, on_main
from grpo_workload.storage.base_model import settle_origin
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.resuming import Source
from grpo_workload.training.checks import check_folders, check_rows, check_steps_left

DATASET, EVALUATION = "dataset", "evaluation.dataset"  # fields, by which checkpoints name what a run reads


def resume(
    contract: Contract, checkpoints: Checkpoints, rank: int, world_size: int
) -> tuple[Contract, Source | None, SavedState]:
    """Choose the checkpoint to resume from and the base model; collective.

    Returns:
        The contract with model and datasets pinned to their commits, the checkpoint (None for a new run), and the state
        in which training starts.
    """
    config, zero_stage = contract.config, contract.config.parallelism.zero_stage
    resumed = checkpoints.find(
        config.storage.resume_from,
        world_size=world_size,
        zero_stage=zero_stage,
        lora=config.adapters,
        optimizer_dtype=config.parallelism.optimizer_dtype,
    )
    check_steps_left(resumed, config.training.max_steps)
    saved = resumed.state.origin if resumed is not None else None
    origin = on_main(lambda: settle_origin(config, saved))
    check_folders(config.model, origin, rank)
    if resumed is not None:
        start = replace(resumed.state, origin=origin)
    else:
        start = SavedState(
            step=0, weight_version=0, num_tokens=0, world_size=world_size, zero_stage=zero_stage, origin=origin
        )
    return contract.model_copy(update={"config": pin_data(origin.pin(config), resumed)}), resumed, start


def pin_data(config: TrainerConfig, resumed: Source | None) -> TrainerConfig:
    """Return `config` with datasets of the hub pinned to their commits, the same ones on all ranks; collective."""
    saved, is_own = (resumed.state.data, resumed.is_own) if resumed is not None else ({}, False)

    def pinned() -> TrainerConfig:
        update: dict[str, Any] = {"dataset": pin(config.dataset, saved.get(DATASET), is_own=is_own)}
        if (section := config.evaluation) is not None:
            try:
                dataset = pin(section.dataset, saved.get(EVALUATION), is_own=is_own)
            except ConfigError as error:
                raise ConfigError(f"evaluation: {error}") from error
            update["evaluation"] = section.model_copy(update={"dataset": dataset})
        return config.model_copy(update=update)

    return on_main(pinned)


def settle_rows(name: str, field: str, origin: DataOrigin, contract: Contract, resumed: Source | None) -> DataOrigin:
    """Return the origin of a dataset for checkpoints; collective.

    Args:
        name: DATASET or EVALUATION.
        field: the field that names it, below that.
        origin: what this rank has found.
        contract: the job.
        resumed: the checkpoint that the run resumes from.

    Raises:
        ConfigError: ranks have found different rows, or other ones than the run began with.
    """
    field = name.removesuffix("dataset") + field
    check_rows(field, gather(origin), contract)
    if resumed is None:
        return origin
    state = resumed.state
    return settle_data(
        field, origin, state.data.get(name), run=contract.job.run, is_own=resumed.is_own, step=state.step
    )
