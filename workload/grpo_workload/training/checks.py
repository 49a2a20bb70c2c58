"""Checks that need more than the spec: other ranks' folders, rewards' time limits, the model's size and context."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from grpo_workload.data.overlong import PromptLimit
from grpo_workload.generation.memory_check import num_parameters
from grpo_workload.policy.policy import Policy
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import Reward
from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.inputs import DatasetConfig, ModelConfig
from grpo_workload.spec.trainer import TrainerConfig
from grpo_workload.storage.base_model import Origin, fingerprint

logger = logging.getLogger(__name__)

SMALL_MODEL = 3e9
"""Below this many parameters, tensor parallelism costs more than it gains (TRL: a loss at 1.5B, a gain at 7B)."""


def check_folders(model: ModelConfig, origin: Origin, rank: int) -> None:
    """Raise ConfigError unless every rank finds in model.path the weights that rank 0 found there; collective."""
    found = gather(origin.fingerprint if model.path is None or rank == 0 else fingerprint(Path(model.path)))
    if others := [rank for rank, one in enumerate(found) if one != origin.fingerprint]:
        raise ConfigError(
            f"model.path: ranks {', '.join(map(str, others))} find other weights in {model.path} than rank 0; every "
            "trainer pod must mount the same volume there, and nothing may write to it while the job starts"
        )


def check_patience(rewards: Sequence[Reward], timeout_seconds: int) -> None:
    """Raise ConfigError for a reward whose time limit is longer than ranks wait for each other."""
    for reward in rewards:
        if reward.timeout_seconds > timeout_seconds:
            raise ConfigError(
                f"rewards[{reward.name}].timeoutSeconds: {reward.timeout_seconds:g} is more than the {timeout_seconds} "
                f"s that ranks wait for each other; use at most {timeout_seconds}, or raise rendezvous.timeoutSeconds"
            )


def prompt_limit(config: TrainerConfig, dataset: DatasetConfig) -> PromptLimit | None:
    """Return how long prompts of a dataset may be with room left for their completions; None without a limit.

    ConfigError if there is no room, or the model's configuration cannot be read.
    """
    context, setting, model = config.generation.max_model_len, "generation.maxModelLen", config.model
    if context is None:
        try:
            read = AutoConfig.from_pretrained(model.source, revision=model.revision or "main")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model.field}: cannot read the configuration of {model.source}: {error}") from error
        context, setting = getattr(read.get_text_config(), "max_position_embeddings", None), "the model's context"
    if context is None:
        return None
    room = context - config.training.max_completion_length
    if room < 1:
        raise ConfigError(
            f"training.maxCompletionLength: {config.training.max_completion_length} tokens leave no room for a prompt; "
            f"{setting} is {context}"
        )
    return PromptLimit(room, setting, dataset.overlong_prompts)


def warn_of_small_slices(config: TrainerConfig, policy: Policy) -> None:
    """Warn if tensor parallelism splits a model that one GPU holds easily."""
    parameters = num_parameters(policy.module.parameters())
    if config.generation.tensor_parallel > 1 and parameters < SMALL_MODEL:
        logger.warning(
            "generation.tensorParallel is %d for a model of %.1f billion parameters: below %.0f billion, one GPU per "
            "copy is faster, since tensor-parallel ranks wait for each other twice in every layer",
            config.generation.tensor_parallel,
            parameters / 1e9,
            SMALL_MODEL / 1e9,
        )
