"""Load everything a rank trains with: `load` calls the parts below in the order in which they need each other."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_spec.contract import ENV_POD_UID, Contract, Device
from grpo_workload.algorithm.reuse import batches_of, steps_of
from grpo_workload.data.shard import shard
from grpo_workload.generation.base import Generator
from grpo_workload.generation.build import build_generator
from grpo_workload.generation.episodes import Episodes
from grpo_workload.policy.model.dtype_support import check_precision, own_support
from grpo_workload.policy.step.policy import Policy
from grpo_workload.policy.trials.trial import try_policy
from grpo_workload.ranks.collectives import gather, join, on_main
from grpo_workload.ranks.pulse import Pulse, open_store
from grpo_workload.reporting.gpu_monitor import open_monitor
from grpo_workload.reporting.progress_files import write_beat
from grpo_workload.reporting.run_report import RankReport, Report, RunReport
from grpo_workload.reporting.start_log import StartLog
from grpo_workload.reporting.trackers import Trackers
from grpo_workload.rewards.scoring import end_check
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.exports import Exports
from grpo_workload.storage.group_record import Group, Place
from grpo_workload.storage.journal import Journal, begin_branch
from grpo_workload.storage.resuming import Source
from grpo_workload.training.inputs import load_data, load_processing_class, start_evaluation, start_prompts
from grpo_workload.training.micro_batch_size import settle_micro_batches
from grpo_workload.training.model_check import memory, refuse_unfit
from grpo_workload.training.resume import DATASET, EVALUATION, resume
from grpo_workload.training.run import Evaluation, Run
from grpo_workload.training.standing import standing
from grpo_workload.training.start_episodes import make_episodes, start_sessions
from grpo_workload.training.subject import Subject
from grpo_workload.training.trials import Trials, read_trials
from grpo_workload.training.weight_check import WeightCheck

logger = logging.getLogger(__name__)


def load(contract: Contract, event_loop: asyncio.Runner, log: StartLog, *, data_dir: Path, state_dir: Path) -> Run:
    """Load everything; collective.

    Args:
        contract: the job.
        event_loop: runs async rewards; the caller keeps it open.
        log: gets a line for each part.
        data_dir: storage that all ranks share, with a folder per run.
        state_dir: the pod's own folder, which the launcher reads.

    Raises:
        ConfigError: a mistake that the user can fix; names the field.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = shard(contract.config.training.prompts_per_step, world_size, rank)
    run_dir = data_dir / contract.job.run

    checkpoints = join_run(contract, rank, data_dir)
    export = contract.config.storage.export
    exports = Exports(data_dir, contract.job.run, export, checkpoints.fence) if export else None
    contract, resumed, start = resume(contract, checkpoints, rank, world_size)
    log.done("checkpoint")
    config = contract.config
    check_model(contract, rank)
    sessions = start_sessions(contract, rank, state_dir)
    tools = sessions.schemas if sessions else None
    tokenizer, source, rewards, data = load_data(contract, resumed, tools)
    trackers = start_trackers(contract, data_dir, start.step)
    evaluation = start_evaluation(contract, rank, tokenizer, rewards, run_dir, start.step, resumed, tools)
    start = replace(start, data={DATASET: data} | ({EVALUATION: evaluation.data} if evaluation else {}))
    prompts, longest = start_prompts(contract, source, rewards, share, start.step, state_dir)
    episodes = make_episodes(config, tokenizer, sessions, [*rewards, *(evaluation.rewards if evaluation else ())])
    log.done("data")
    trials = read_trials(contract, run_dir)
    policy = build_policy(contract, rank, resumed, tokenizer.pad_token_id, trials, log)
    weight_check = WeightCheck(config, tokenizer)
    generator = start_generator(contract, rank, policy, tokenizer, start.weight_version, weight_check, episodes)
    log.done("engines")
    contract = settle_micro_batches(
        contract,
        policy,
        generator,
        rank=rank,
        weight_version=start.weight_version,
        longest=longest,
        has_images=source.has_images,
        state_dir=state_dir,
        trials=trials,
    )
    log.done("micro-batches")
    end_check(rewards, "dataset")
    if evaluation is not None:
        end_check(evaluation.rewards, "evaluation.dataset")
    journal, known, report = open_records(contract, rank, start.step, trackers, run_dir, state_dir, evaluation)
    return Run(
        config=contract.config,
        rank=rank,
        world_size=world_size,
        share=share,
        processing_class=load_processing_class(config.model, tokenizer, policy.module.config),
        prompts=prompts,
        rewards=rewards,
        evaluation=evaluation,
        policy=policy,
        generator=generator,
        weight_check=weight_check,
        checkpoints=checkpoints,
        exports=exports,
        name=contract.job.name,
        journal=journal,
        known=known,
        start=start,
        report=report,
        monitor=open_monitor(policy.device),
        pulse=start_pulse(contract, rank, state_dir),
        event_loop=event_loop,
        sessions=sessions,
    )


def join_run(contract: Contract, rank: int, data_dir: Path) -> Checkpoints:
    """Join the process group, check the GPUs' precision, and take the run's fence for this attempt; collective."""
    join(contract.device, contract.timeout_seconds)
    slow = check_precision(contract.config.model.dtype, gather(own_support(rank, contract.device)))
    if slow and rank == 0:
        logger.warning(slow)
    return Checkpoints(
        data_dir,
        contract.job.run,
        keep=contract.config.storage.keep,
        attempt=contract.attempt,
        pod_uid=os.environ[ENV_POD_UID],
    )


def start_pulse(contract: Contract, rank: int, state_dir: Path) -> Pulse:
    """Join the ranks that wait for each other after sampling; each beat is also reported to the launcher."""
    return Pulse(
        open_store(contract.timeout_seconds),
        rank=rank,
        world_size=contract.world_size,
        limit_seconds=contract.timeout_seconds,
        on_beat=partial(write_beat, state_dir, rank),
    )


def check_model(contract: Contract, rank: int) -> None:
    """Refuse a model that cannot be trained like this, before anything that takes minutes; see `model_check`."""
    subject = Subject(contract)
    refuse_unfit(subject, logs=rank == 0)
    if contract.device is Device.CUDA:  # once, for the smallest GPU: it takes seconds, and a gigabyte of host memory
        subject.gpu_bytes = min(gather(torch.cuda.mem_get_info()[1]))
        text = on_main(lambda: memory(subject))
        if rank == 0:
            logger.info("the plan of the job's memory: %s", text)


def start_trackers(contract: Contract, data_dir: Path, step: int) -> Trackers:
    """Start the experiment trackers on rank 0, before anything that takes long to load; collective."""
    trackers = Trackers(contract.config, contract.job, data_dir)
    on_main(lambda: trackers.start(step))
    return trackers


def build_policy(
    contract: Contract, rank: int, resumed: Source | None, pad_token_id: int, trials: Trials, log: StartLog
) -> Policy:
    """Build the policy, load the checkpoint into it, and try it unless an earlier attempt has; collective."""
    policy = Policy(
        contract.config,
        contract.device,
        timeout_seconds=contract.timeout_seconds,
        pad_token_id=pad_token_id,
        load_universal=resumed is not None and resumed.is_universal,
        reference=resumed.reference if resumed is not None and contract.config.training.sync_ref_model else None,
    )
    log.done("model")
    if resumed is not None:
        resumed.load(policy)
        logger.info("resuming from %s", resumed.checkpoint)
        log.done("states")
    if trials.found is None:
        try_policy(policy, contract.config)
    log.done("trial")
    if rank == 0:
        training = contract.config.training
        logger.info(
            "training.importanceSamplingCorrection: %s; importanceSamplingClipMax: %s",
            training.importance_sampling_correction,
            training.importance_sampling_clip_max,
        )
    return policy


def start_generator(
    contract: Contract,
    rank: int,
    policy: Policy,
    tokenizer: Any,
    weight_version: int,
    weight_check: WeightCheck,
    episodes: Episodes | None = None,
) -> Generator:
    """Build the generator and push the policy's weights; collective.

    Engines have loaded the base model, which is version 0. It is pushed to them even so: what a push would do wrong
    shows before anything is sampled, and vLLM refuses adapters that it does not support.

    Raises:
        WeightsDifferError: after the push an engine holds other weights than the policy.
    """
    generator = build_generator(contract, rank, policy, tokenizer, episodes)
    generator.sync_weights(policy.weights(), weight_version)
    weight_check.run(policy, generator, weight_version)
    return generator


def open_records(
    contract: Contract,
    rank: int,
    step: int,
    trackers: Trackers,
    run_dir: Path,
    state_dir: Path,
    evaluation: Evaluation | None,
) -> tuple[Journal, dict[Place, Group], Report]:
    """Begin this attempt's branch of the journal, and open the rank's report; collective.

    Returns:
        The journal, the groups of the generation of `step` that an earlier attempt journalled, and the report.
    """
    training = contract.config.training
    count = len(batches_of(steps_of(step, training), training))
    branch, known = on_main(lambda: begin_branch(run_dir, attempt=contract.attempt, step=step, count=count))
    report: Report = RankReport(state_dir, rank)
    if rank == 0:
        last = standing(evaluation.config, evaluation.past) if evaluation is not None else None
        report = RunReport(
            run_dir,
            state_dir,
            total_steps=training.max_steps,
            step=step,
            attempt=contract.attempt,
            steps_per_push=training.steps_per_push,
            trackers=trackers,
            evaluation=None if last is None else last.progress(),
        )
    return Journal(run_dir, branch, rank), {group.place: group for group in known}, report
