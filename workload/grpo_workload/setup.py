"""All parts of the training on one rank, loaded in the order in which they need each other."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from grpo_workload import batching
from grpo_workload.checkpoint import Checkpoints, TrainerState
from grpo_workload.collectives import gather, join, on_main
from grpo_workload.config import TrainerConfig
from grpo_workload.contract import ENV_POD_UID, Contract
from grpo_workload.device_use import Monitor, open_monitor
from grpo_workload.engine import Policy
from grpo_workload.generation.base import Generator
from grpo_workload.generation.build import build_generator
from grpo_workload.generation.memory import num_parameters
from grpo_workload.group import Group
from grpo_workload.inputs import ModelConfig
from grpo_workload.journal import Journal, begin_branch
from grpo_workload.origin import Origin, fingerprint, settle_origin
from grpo_workload.precision import check_precision, own_support
from grpo_workload.prefetch import PromptLoader
from grpo_workload.report import RankReport, Report, RunReport
from grpo_workload.rewards import Reward, build_rewards
from grpo_workload.tasks import load_prompts
from grpo_workload.tracking import Trackers

logger = logging.getLogger(__name__)

SMALL_MODEL = 3e9
"""Parameters below which tensor parallelism costs more than it gives (TRL measured a loss at 1.5B and a gain at 7B)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the loop works with."""

    config: TrainerConfig
    rank: int
    world_size: int
    share: range  # this rank's prompts among those of a step
    max_prompt_tokens: int | None
    tokenizer: Any
    prompts: PromptLoader
    rewards: list[Reward]
    policy: Policy
    generator: Generator
    checkpoints: Checkpoints
    journal: Journal
    known: dict[int, Group]  # by position in the first step: journalled before, under the weights that the run goes on from
    start: TrainerState
    report: Report
    monitor: Monitor
    event_loop: asyncio.Runner  # one for all steps: async rewards may keep connections


def load(contract: Contract, event_loop: asyncio.Runner, *, data_dir: Path, state_dir: Path) -> Run:
    """Load everything; collective.

    Args:
        contract: the job.
        event_loop: for async rewards, kept open by the caller.
        data_dir: storage shared by all ranks, runs are below it.
        state_dir: the pod's own folder, for the launcher.

    Raises:
        ValueError: what the user has to mend, naming the field.
    """
    config, rank, world_size = contract.config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training, zero_stage = config.training, config.parallelism.zero_stage
    share = batching.shard(training.prompts_per_step, world_size, rank)
    join(contract.device, contract.timeout_seconds)
    check_precision(config.model.dtype, gather(own_support(rank, contract.device)))
    pod_uid = os.environ[ENV_POD_UID]
    checkpoints = Checkpoints(data_dir, contract.job.run, keep=config.storage.keep, epoch=contract.epoch, pod_uid=pod_uid)
    resumed = checkpoints.find(config.storage.resume_from, world_size=world_size, zero_stage=zero_stage, lora=config.adapters)
    saved = resumed.state.origin if resumed is not None else None
    origin = on_main(lambda: settle_origin(config, saved))
    check_folders(config.model, origin, rank)
    config = origin.pin(config)
    contract = contract.model_copy(update={"config": config})
    tokenizer = load_tokenizer(config.model)
    source = load_prompts(config.dataset, tokenizer, seed=training.seed)
    rewards = build_rewards(config.rewards, source)
    check_patience(rewards, contract.timeout_seconds)
    trackers = Trackers(config, contract.job, data_dir)
    on_main(lambda: trackers.start(resumed.state.step if resumed is not None else 0))
    # Before what takes longest to load, so that workers load beside it.
    prompts = PromptLoader(
        source,
        share=share,
        prompts_per_step=training.prompts_per_step,
        steps=range(resumed.state.step if resumed is not None else 0, training.max_steps),
        num_workers=config.dataset.num_workers,
        prefetch_steps=config.dataset.prefetch_steps,
        timeout_seconds=contract.timeout_seconds,
        folder=state_dir,
    )
    policy = Policy(
        config,
        contract.device,
        timeout_seconds=contract.timeout_seconds,
        pad_token_id=tokenizer.pad_token_id,
        load_universal=resumed is not None and resumed.is_universal,
    )
    if rank == 0:
        warn_of_small_slices(config, policy)
    start = TrainerState(step=0, weight_version=0, num_tokens=0, world_size=world_size, zero_stage=zero_stage, origin=origin)
    if resumed is not None:
        resumed.load(policy)
        start = replace(resumed.state, origin=origin)
        logger.info("going on from %s", resumed.checkpoint)
    generator = build_generator(contract, rank, policy, tokenizer)
    # What engines have loaded is version 0, but for adapters: those that vLLM has none for are refused here.
    if start.weight_version > 0 or config.pushes_adapters:
        generator.sync_weights(policy.weights(), start.weight_version)
    run_dir = data_dir / contract.job.run
    branch, known = on_main(lambda: begin_branch(run_dir, epoch=contract.epoch, step=start.step))
    report: Report = RankReport(state_dir, rank)
    if rank == 0:
        report = RunReport(run_dir, state_dir, total_steps=training.max_steps, step=start.step, trackers=trackers)
    return Run(
        config=config,
        rank=rank,
        world_size=world_size,
        share=share,
        max_prompt_tokens=max_prompt_tokens(config, policy),
        tokenizer=tokenizer,
        prompts=prompts,
        rewards=rewards,
        policy=policy,
        generator=generator,
        checkpoints=checkpoints,
        journal=Journal(run_dir, branch, rank),
        known={group.position: group for group in known},
        start=start,
        report=report,
        monitor=open_monitor(policy.device),
        event_loop=event_loop,
    )


def check_folders(model: ModelConfig, origin: Origin, rank: int) -> None:
    """ValueError unless every rank finds in model.path what rank 0 did, as `origin` tells; collective."""
    found = gather(origin.fingerprint if model.path is None or rank == 0 else fingerprint(Path(model.path)))
    if others := [rank for rank, one in enumerate(found) if one != origin.fingerprint]:
        raise ValueError(
            f"model.path: ranks {', '.join(map(str, others))} find other weights in {model.path} than rank 0; every trainer pod has to "
            "mount the same volume there, and nothing may write to it meanwhile"
        )


def check_patience(rewards: Sequence[Reward], timeout_seconds: int) -> None:
    """ValueError for a reward that may take longer than the ranks that are done wait for the others."""
    for reward in rewards:
        if reward.timeout_seconds > timeout_seconds:
            raise ValueError(
                f"rewards[{reward.name}].timeoutSeconds: {reward.timeout_seconds:g} is more than the {timeout_seconds} s that ranks wait "
                f"for each other; use at most {timeout_seconds}, or raise rendezvous.timeoutSeconds"
            )


def max_prompt_tokens(config: TrainerConfig, policy: Policy) -> int | None:
    """Tokens of a prompt that leave room for its completion; None for a model without a limit of its own."""
    text_config = policy.module.config.get_text_config()
    context = config.generation.max_model_len or getattr(text_config, "max_position_embeddings", None)
    return None if context is None else context - config.training.max_completion_length


def warn_of_small_slices(config: TrainerConfig, policy: Policy) -> None:
    """Tell when generation spreads a model over GPUs that one of them holds easily: each layer then waits for the others twice."""
    parameters = num_parameters(policy.module.parameters())
    if config.generation.tensor_parallel > 1 and parameters < SMALL_MODEL:
        logger.warning(
            "generation.tensorParallel is %d for a model of %.1f billion parameters: below %.0f billion, one GPU for each copy is faster, "
            "since tensor parallel ranks wait for each other twice a layer",
            config.generation.tensor_parallel,
            parameters / 1e9,
            SMALL_MODEL / 1e9,
        )


def load_tokenizer(model: ModelConfig) -> Any:
    """The model's tokenizer, with a pad token. ValueError when it cannot be found."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.source, revision=model.revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(f"model.{'name' if model.name else 'path'}: cannot load the tokenizer of {model.source}: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
