"""Tries the longest sequence, and settles `training.maxTokensPerMicroBatch` where the job leaves it to the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.generation import Topology
from grpo_spec.trainer import TrainerConfig
from grpo_spec.training import MICRO_BATCH_TOKENS
from grpo_spec.words import counted
from grpo_workload.algorithm.token_budget import MOST
from grpo_workload.data.scan import Longest
from grpo_workload.generation.base import Generator
from grpo_workload.policy.step.policy import Policy
from grpo_workload.policy.trials.memory_trial import (
    GIB,
    Choice,
    CudaMemory,
    TooLongError,
    longest_sample,
    try_memory,
)
from grpo_workload.ranks.collectives import gather
from grpo_workload.reporting.progress_files import write_phase
from grpo_workload.training.trials import Found, Trials

logger = logging.getLogger(__name__)

UNEVEN = 1.25
"""Ratio of free memory from which on ranks are named that have less than others."""


def settle_micro_batches(
    contract: Contract,
    policy: Policy,
    generator: Generator,
    *,
    rank: int,
    weight_version: int,
    longest: Longest,
    has_images: bool,
    state_dir: Path,
    trials: Trials,
) -> Contract:
    """Return the contract with a size of micro-batches; collective.

    On GPUs, the longest sequence is tried, and the size is as large as memory allows. A colocated engine sleeps
    meanwhile, as it does while the policy trains, and gets the weights again.

    Args:
        contract: the job.
        policy: with the weights that it begins with.
        generator: after the first push.
        rank: this rank.
        weight_version: version of the weights of policy and generator.
        longest: the longest prompt of this rank.
        has_images: prompts may have images.
        state_dir: the pod's own folder, which the launcher reads.
        trials: what an earlier attempt has found is not tried again.

    Raises:
        ConfigError: the longest sequence does not fit into memory; says how much it takes, and what to change.
        MicroBatchMemoryError: a micro-batch of several sequences ran out of memory.
    """
    config, halvings = contract.config, contract.micro_batch_halvings
    halved = f", halved {counted(halvings, 'time')} after running out of memory" if halvings else ""
    set_size, why = config.training.max_tokens_per_micro_batch, _why_fixed(config, policy, has_images=has_images)
    fixed = set_size or (None if why is None else max(1, MICRO_BATCH_TOKENS >> halvings))
    prompt_tokens = longest_prompt(gather((longest.tokens, longest.is_known))) if policy.device.type == "cuda" else 0
    if policy.device.type == "cuda" and (known := trials.tokens(prompt_tokens)) is not None:
        fixed, why = known, "as in an earlier attempt"
    elif policy.device.type == "cuda":
        write_phase(state_dir, rank, "Measuring")
        generator.sleep()
        choice = _try(contract, policy, longest, prompt_tokens, fixed=fixed)
        torch.cuda.empty_cache()
        if config.generation.topology is Topology.COLOCATE:
            generator.sync_weights(policy.weights(), weight_version)
        write_phase(state_dir, rank, "Loading")
        why = why or f"chosen from {choice.room / GIB:.1f} GiB free"
        if rank == 0:
            _warn(config, choice, prompt_tokens)
        fixed = choice.tokens
    assert fixed is not None
    trials.keep(Found(fixed, prompt_tokens))
    if rank == 0 and set_size is not None:
        logger.info("micro-batches of %d tokens: training.maxTokensPerMicroBatch%s", fixed, halved)
    elif rank == 0:
        logger.info("micro-batches of %d tokens, %s%s (training.maxTokensPerMicroBatch is not set)", fixed, why, halved)
    return _with_tokens(contract, fixed)


def _why_fixed(config: TrainerConfig, policy: Policy, *, has_images: bool) -> str | None:
    """Return why the size does not depend on the memory that is free; None if it does."""
    if policy.device.type != "cuda":
        return "the default without a GPU"
    if config.training.per_device_train_batch_size == 1:
        return "the default with training.perDeviceTrainBatchSize 1, where each holds one sequence, however long"
    if config.model.attention in ("eager", "sdpa"):
        return f"the default with model.attention {config.model.attention}: its memory grows with the square of tokens"
    if has_images:
        return "the default with images, whose size decides what the vision tower takes"
    return None


def _try(contract: Contract, policy: Policy, longest: Longest, prompt_tokens: int, *, fixed: int | None) -> Choice:
    completion_tokens = contract.config.training.max_completion_length
    length = prompt_tokens + completion_tokens
    try:
        return try_memory(
            policy,
            CudaMemory(policy),
            longest_sample(policy, length, completion_tokens, longest.prompt),
            most=most_tokens(contract, length, at_most=fixed or MOST * contract.config.parallelism.sequence),
            fixed=fixed,
            halvings=contract.micro_batch_halvings,
        )
    except TooLongError as error:
        raise ConfigError(refusal(contract.config, error, prompt_tokens)) from error


def longest_prompt(found: Sequence[tuple[int, bool]]) -> int:
    """Return the number of tokens of the longest prompt that was read; say so if others may be longer.

    Args:
        found: by rank: tokens of its longest prompt, and whether no other is longer.
    """
    tokens = max(tokens for tokens, _ in found)
    if not all(known for _, known in found):  # no job ends for the length of a prompt that may not exist
        logger.info("the longest prompt that was read has %d tokens; memory for longer ones is not tried", tokens)
    return tokens


def refusal(config: TrainerConfig, error: TooLongError, prompt_tokens: int) -> str:
    """Say that the longest sequence does not fit: what it takes, what there is, and the fields that change it.

    Args:
        config: the job's configuration.
        error: what was found.
        prompt_tokens: tokens of the longest prompt.
    """
    training, parallelism = config.training, config.parallelism
    cures = ["lower training.maxCompletionLength"]
    if prompt_tokens > training.max_completion_length:
        cures.append("lower generation.maxModelLen, with dataset.overlongPrompts skip or truncate")
    if config.model.attention in ("eager", "sdpa"):
        cures.append(
            f"model.attention varlen (the memory of {config.model.attention} grows with the square of the length)"
        )
    if not parallelism.gradient_checkpointing:
        cures.append("parallelism.gradientCheckpointing")
    elif not parallelism.offload_activations:
        cures.append("parallelism.offloadActivations")
    if parallelism.zero_stage < 3:
        cures.append("parallelism.zeroStage 3")
    if parallelism.optimizer_dtype == "float32" and parallelism.offload_optimizer != "cpu":
        cures.append("parallelism.optimizerDtype int8")
    if config.model.attention == "varlen":
        cures.append(f"parallelism.sequence over {parallelism.sequence}, with as many trainer GPUs at least")
    if parallelism.offload_optimizer == "none":
        cures.append("parallelism.offloadOptimizer")
    if config.generation.topology is Topology.COLOCATE and config.generation.sleep_level == 0:
        cures.append("generation.colocate.sleepLevel 2")
    if config.lora is None:
        cures.append("lora")
    about = "about" if error.needed > error.free else "more than"
    return (
        f"training.maxCompletionLength: the longest sequence that the job allows, a prompt of {prompt_tokens} tokens "
        f"and a completion of {training.max_completion_length}, does not fit into a GPU's memory: it takes {about} "
        f"{error.needed / GIB:.1f} GiB beside weights, gradients and optimizer states, and {error.free / GIB:.1f} GiB "
        f"are free; what helps: {'; '.join(cures)}; or GPUs with more memory{f': {error.cause}' if error.cause else ''}"
    )


def _warn(config: TrainerConfig, choice: Choice, prompt_tokens: int) -> None:
    length = prompt_tokens + config.training.max_completion_length
    if choice.longest > choice.room:
        logger.warning(
            "the longest sequence, of %d tokens, takes %.1f GiB, which leaves less than a tenth of the GPU free; "
            "parallelism.zeroStage 3, parallelism.offloadOptimizer or more GPUs free some",
            length,
            choice.longest / GIB,
        )
    elif (
        choice.tokens < min(length, MOST * config.parallelism.sequence)
        and config.training.max_tokens_per_micro_batch is None
    ):
        logger.warning(
            "memory is so short that a long sequence is a micro-batch of its own, which is slow: %.1f GiB are free "
            "beside weights, optimizer states and a tenth of the GPU; parallelism.zeroStage 3, "
            "parallelism.offloadOptimizer or more GPUs free some",
            choice.room / GIB,
        )
    if (most := max(choice.rooms)) > UNEVEN * max(1, choice.room):
        logger.warning(
            "rank %d has %.1f GiB free for micro-batches and rank %d has %.1f: all ranks take the size that fits into "
            "the first, since they train on equally many tokens in equally many micro-batches",
            choice.rooms.index(choice.room),
            choice.room / GIB,
            choice.rooms.index(most),
            most / GIB,
        )


def most_tokens(contract: Contract, length: int, *, at_most: int = MOST) -> int:
    """Return the largest size of use: what a rank, or ranks that share sequences, train on in a step of the longest.

    Args:
        contract: the job.
        length: tokens of the longest sequence.
        at_most: no size is larger.
    """
    training = contract.config.training
    sequences = -(-training.prompts_per_step * training.num_generations // contract.sequence_groups)
    sequences = min(sequences, training.per_device_train_batch_size or sequences)
    return min(at_most, sequences * length)


def _with_tokens(contract: Contract, tokens: int) -> Contract:
    training = contract.config.training.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return contract.model_copy(update={"config": contract.config.model_copy(update={"training": training})})
