"""Settles `training.maxTokensPerMicroBatch` where the job leaves it to the trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from grpo_spec.contract import Contract
from grpo_spec.generation import Topology
from grpo_spec.trainer import TrainerConfig
from grpo_spec.training import MICRO_BATCH_TOKENS
from grpo_workload.algorithm.token_budget import MOST
from grpo_workload.generation.base import Generator
from grpo_workload.policy.step.policy import Policy
from grpo_workload.policy.trials.memory_trial import GIB, CudaMemory, choose_tokens
from grpo_workload.reporting.progress_files import write_phase

logger = logging.getLogger(__name__)


def settle_micro_batches(
    contract: Contract,
    policy: Policy,
    generator: Generator,
    *,
    rank: int,
    weight_version: int,
    has_images: bool,
    state_dir: Path,
) -> Contract:
    """Return the contract with a size of micro-batches; collective. On GPUs it is as large as memory allows.

    A colocated engine sleeps meanwhile, as it does while the policy trains, and gets the weights again.

    Args:
        contract: the job.
        policy: with the weights that it begins with.
        generator: after the first push.
        rank: this rank.
        weight_version: version of the weights of policy and generator.
        has_images: prompts may have images.
        state_dir: the pod's own folder, which the launcher reads.

    Raises:
        MicroBatchMemoryError: a micro-batch ran out of memory.
    """
    config, halvings = contract.config, contract.micro_batch_halvings
    halved = f", halved {halvings} times after running out of memory" if halvings else ""
    if (tokens := config.training.max_tokens_per_micro_batch) is not None:
        if rank == 0:
            logger.info("micro-batches of %d tokens: training.maxTokensPerMicroBatch%s", tokens, halved)
        return contract
    why = _why_fixed(config, policy, has_images=has_images)
    if why is None:
        write_phase(state_dir, rank, "Measuring")
        generator.sleep()
        most = most_tokens(contract, policy.module.config)
        length = sequence_tokens(config, most)
        tokens, room = choose_tokens(policy, CudaMemory(policy), most=most, length=length, halvings=halvings)
        torch.cuda.empty_cache()
        if config.generation.topology is Topology.COLOCATE:
            generator.sync_weights(policy.weights(), weight_version)
        why = f"chosen from {room / GIB:.1f} GiB free"
        if rank == 0 and tokens < length:
            logger.warning(
                "memory is so short that each sequence is a micro-batch of its own, which is slow: %.1f GiB are free "
                "beside weights, optimizer states and a tenth of the GPU; parallelism.zeroStage 3, "
                "parallelism.offloadOptimizer or more GPUs free some",
                room / GIB,
            )
        write_phase(state_dir, rank, "Loading")
    else:
        tokens = max(1, MICRO_BATCH_TOKENS >> halvings)
    if rank == 0:
        logger.info(
            "micro-batches of %d tokens, %s%s (training.maxTokensPerMicroBatch is not set)", tokens, why, halved
        )
    return _with_tokens(contract, tokens)


def _why_fixed(config: TrainerConfig, policy: Policy, *, has_images: bool) -> str | None:
    """Why the size does not depend on the memory that is free; None if it does."""
    if policy.device.type != "cuda":
        return "the default without a GPU"
    if config.training.per_device_train_batch_size == 1:
        return "the default with training.perDeviceTrainBatchSize 1, where each holds one sequence, however long"
    if config.model.attention in ("eager", "sdpa"):
        return f"the default with model.attention {config.model.attention}: its memory grows with the square of tokens"
    if has_images:
        return "the default with images, whose size decides what the vision tower takes"
    return None


def most_tokens(contract: Contract, model_config: Any) -> int:
    """Return the largest size of use: what a rank trains on in a step, if all completions are as long as may be.

    Args:
        contract: the job.
        model_config: transformers' configuration of the model.
    """
    training = contract.config.training
    sequences = -(-training.prompts_per_step * training.num_generations // contract.world_size)
    sequences = min(sequences, training.per_device_train_batch_size or sequences)
    context: Any = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return min(MOST, sequences * (contract.config.generation.max_model_len or context or MOST))


def sequence_tokens(config: TrainerConfig, most: int) -> int:
    """Return the tokens of a sequence on which memory is measured: `most` are in `perDeviceTrainBatchSize` of them."""
    training = config.training
    return max(training.max_completion_length + 1, -(-most // (training.per_device_train_batch_size or most)))


def _with_tokens(contract: Contract, tokens: int) -> Contract:
    training = contract.config.training.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return contract.model_copy(update={"config": contract.config.model_copy(update={"training": training})})
