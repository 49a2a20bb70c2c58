"""GRPO training on one rank: `train` is the loop; `run_rank` loads what it needs, runs it and closes everything.

Group Relative Policy Optimization (arXiv:2402.03300), with these differences from the paper:
- One optimizer step a generation (mu = 1), unless `stepsPerGeneration` or `numIterations` is over 1: the old
  log-probabilities are the new ones, detached, so the ratio is 1 and clipping has no effect. The loss is weighted by
  how far the generator's log-probabilities are from the old ones (`importanceSamplingCorrection`), also where older
  weights sampled (`maxStaleness`).
- Token losses are divided by the number of tokens in the whole batch (dapo, arXiv:2503.14476) unless `lossType` says
  otherwise.
- There is no KL term and no reference model unless `beta` > 0; the reference is always the initial model.
- The batch of a step is prompts x generations over all ranks. Each rank has a contiguous share of the prompts; shares
  differ by at most one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler
from transformers import set_seed

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.reports import ExitCode
from grpo_workload.algorithm.reuse import batch_of
from grpo_workload.environments.base import EnvironmentLostError
from grpo_workload.policy.memory.memory_error import MicroBatchMemoryError
from grpo_workload.policy.step.finite import NotFiniteError
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather, leave
from grpo_workload.ranks.seeds import step_seed
from grpo_workload.reporting.progress_files import write_beat
from grpo_workload.reporting.rank_metrics import RankStep, summarise_ranks
from grpo_workload.reporting.start_log import StartLog
from grpo_workload.rewards.scoring import close_rewards
from grpo_workload.training.assemble import load
from grpo_workload.training.balance import Advisor
from grpo_workload.training.evaluation import evaluate, is_due, is_due_at_start
from grpo_workload.training.health import Health, left_out_warnings
from grpo_workload.training.lost_episodes import EnvironmentFailedError
from grpo_workload.training.rollout import Generation, roll_out
from grpo_workload.training.run import Run
from grpo_workload.training.saving import Saving
from grpo_workload.training.session_advice import SessionAdvisor
from grpo_workload.training.step_summary import describe_rank, summarise_step
from grpo_workload.training.work import Work, prepare
from grpo_workload.weights.differ import WeightsDifferError

logger = logging.getLogger(__name__)


def train(run: Run, saving: Saving, stop: StopFlag, log: StartLog) -> ExitCode:
    """Run the steps; collective. `log` gets a line when the first one is done.

    Returns:
        DONE after maxSteps, or earlier where evaluations say so; STOPPED, with a checkpoint saved, if a rank was asked
        to stop before: at the end of the generation that it was in.

    Raises:
        NotFiniteError: too many steps in a row were skipped, or the weights to save are not finite.
        EnvironmentFailedError: too many episodes of a step or an evaluation were lost.
    """
    training = run.config.training
    num_tokens, stopping = run.start.num_tokens, False
    past = run.evaluation.past if run.evaluation else {}
    if is_due_at_start(run.config, past, run.start.step):
        evaluate(run, run.start.step)
    standing = run.standing()
    is_end = standing is not None and standing.stops
    health, advisor = Health(training.max_skipped_steps, run.config.rewards), Advisor(run.config)
    crowding = SessionAdvisor(run.config)
    run.generator.idle_seconds()  # those before the first step do not count
    since = Clock()
    generation: Generation | None = None
    works: dict[int, Work] = {}
    for step in range(run.start.step, run.start.step if is_end else training.max_steps):
        clock = Clock()
        run.monitor.begin()
        set_seed(step_seed(training.seed, step, run.rank))
        engines = run.generator.engines()

        if generation is None or step not in generation.steps:
            generation = roll_out(run, step, clock)
        run.report.phase("Training")
        if step == generation.steps.start:
            works = prepare(run, generation)
        work, is_last = works[batch_of(step, training)], step + 1 == generation.steps.stop
        update = _update(run, work, clock, is_last=is_last)
        if is_last:
            _push(run, generation, clock)
        stopping, is_written, ranks = _agree(run, saving, stop, generation, step, work, clock)
        seconds, since = since.seconds, Clock()

        metrics = summarise_step(run, step, work.rollout, num_tokens, clock) | update | summarise_ranks(ranks)
        num_tokens = int(metrics["num_tokens"])
        metrics |= saving.turn(step, is_written=is_written)
        warnings = health.add(metrics) + left_out_warnings(run.generator.left_out())
        metrics["skipped_steps"] = health.skipped_steps
        if engines:
            metrics["engines/count"] = float(len(engines))
        sizes = [engine.world_size for engine in engines]
        balance = advisor.add(metrics, seconds, sizes)
        advice = crowding.add(metrics, seconds) or balance.advice  # engines that get no episodes seem to be too many
        is_end = step + 1 == training.max_steps
        evaluates = is_last and is_due(run.config, past, step + 1, generation.steps.start)
        # A rank that was asked to stop saves first; the evaluation is made then, or when the run goes on.
        if evaluates and not (stopping or health.gives_up):
            evaluate(run, step + 1)
            standing, since = run.standing(), Clock()
            is_end = is_end or (standing is not None and standing.stops)
        shown = metrics | balance.metrics
        if step == run.start.step:
            log.done("first step")
        run.report.step(step, shown, work.rollout.samples, ranks, warnings, advice, sum(sizes))

        saving.save(generation.steps, step, metrics, gives_up=health.gives_up, stopping=stopping, is_end=is_end)
        if health.gives_up:
            raise health.error()
        if evaluates and stopping and is_end:
            evaluate(run, step + 1)
        if is_end or (stopping and is_last):
            break
    done = is_end or not stopping
    run.report.phase("Done" if done else "Stopped")
    return ExitCode.DONE if done else ExitCode.STOPPED


def _update(run: Run, work: Work, clock: Clock, *, is_last: bool) -> dict[str, float]:
    """Take the optimizer step, after which the step's groups are on the disk; returns its metrics; collective."""
    if is_last:
        run.generator.expect_weights()
    update = run.policy.step(work.micro_batches, work.plan.num_micro_batches, work.plan.scale)
    clock.lap("train")
    run.report.phase("Journalling")
    run.journal.settle()
    clock.lap("journal")
    return update


def _push(run: Run, generation: Generation, clock: Clock) -> None:
    """Give the engines the weights after a generation's last step; the first that were trained are checked."""
    version = generation.steps.stop
    run.report.phase("Syncing")
    run.generator.sync_weights(run.policy.weights(), version)
    run.report.pushed(version)
    if generation.steps.start == run.start.step:
        run.weight_check.run(run.policy, run.generator, version)
    clock.lap("sync")


def _agree(
    run: Run, saving: Saving, stop: StopFlag, generation: Generation, step: int, work: Work, clock: Clock
) -> tuple[bool, bool, list[RankStep]]:
    """Return whether any rank was asked to stop, whether all have written the last checkpoint, and each one's step."""
    run.report.phase("Agreeing")
    ends = gather((stop.is_set, saving.is_written, describe_rank(run, generation, step, work, clock)))
    clock.lap("agree")
    return any(asked for asked, _, _ in ends), all(written for _, written, _ in ends), [rank for _, _, rank in ends]


class StopFlag:
    """Flag that SIGTERM sets; at the end of each step the loop gathers it from all ranks."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Set the flag on SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, *_: Any) -> None:
        self.is_set = True


def run_rank(contract: Contract, *, data_dir: Path, state_dir: Path, began: float) -> ExitCode:
    """Train as the contract says; returns the exit code.

    Args:
        contract: the job.
        data_dir: storage that all ranks share, with a folder per run.
        state_dir: the pod's own folder, which the launcher reads.
        began: when this rank's part of the attempt began, in `machine_seconds`.
    """
    stop = StopFlag()
    errors = get_error_handler()
    errors.initialize()
    log = StartLog(int(os.environ["RANK"]), began)
    log.done("programs")
    try:
        with asyncio.Runner() as event_loop:
            try:
                run = load(contract, event_loop, log, data_dir=data_dir, state_dir=state_dir)
            except ConfigError as error:
                return refuse(error, errors)
            except WeightsDifferError as error:
                return refuse(error, errors, ExitCode.WEIGHTS_DIFFER)
            except MicroBatchMemoryError as error:
                return refuse(error, errors, ExitCode.OUT_OF_MEMORY)
            except EnvironmentLostError as error:
                return refuse(error, errors, ExitCode.ENVIRONMENT_FAILED)
            # Not earlier: while it loads, a rank has nothing to save and may die of the signal. Libraries also install
            # handlers of their own while they load, which this one replaces.
            stop.install()
            saving = Saving(run)
            try:
                exit_code = train(run, saving, stop, log)
            except ConfigError as error:  # rows are first read, and users' functions called, at their step
                return refuse(error, errors)
            except NotFiniteError as error:
                return refuse(error, errors, ExitCode.NOT_FINITE)
            except EnvironmentFailedError as error:
                return refuse(error, errors, ExitCode.ENVIRONMENT_FAILED)
            except WeightsDifferError as error:
                return refuse(error, errors, ExitCode.WEIGHTS_DIFFER)
            except MicroBatchMemoryError as error:
                return refuse(error, errors, ExitCode.OUT_OF_MEMORY)
            except RuntimeError as error:  # perhaps a collective failed because another rank has lost its engine
                raise run.generator.blame(error) from error
            finally:
                saving.end()
                run.prompts.close()
                close_rewards([*run.rewards, *(run.evaluation.rewards if run.evaluation else ())])
            run.report.close()
            run.journal.close()
            run.monitor.close()
            run.generator.close()
            if run.sessions is not None:
                run.sessions.close()
            leave()
            if exit_code == ExitCode.DONE and run.exports and run.exports.is_uploading:
                run.report.phase("Uploading")

                def waits() -> bool:
                    write_beat(state_dir, run.rank)
                    return not stop.is_set

                exit_code = ExitCode.DONE if run.exports.finish(waits) else ExitCode.STOPPED
                run.report.phase("Done" if exit_code == ExitCode.DONE else "Stopped")
            return exit_code
    except Exception as error:
        errors.record_exception(error)
        raise


def refuse(error: Exception, errors: ErrorHandler, exit_code: ExitCode = ExitCode.CONFIG_ERROR) -> ExitCode:
    """Report to the launcher what the user has to look at; returns the exit code, which stands for the reason."""
    logger.error("%s", error)
    errors.record_exception(error)
    return exit_code
