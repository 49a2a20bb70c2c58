"""GRPO training on one rank: `python -m grpo_workload.train`, started by the launcher with torchrun's variables.

Group Relative Policy Optimization (arXiv:2402.03300), with these departures from the paper:
- One optimizer step a batch (mu = 1), on-policy: the old log-probabilities are the new ones without their graph, so the ratio is 1 and
  clipping never acts. The loss is weighed by how far the generator's own log-probabilities are from them (`importanceSamplingCorrection`).
- Token losses are divided by the tokens of the whole batch (dapo, arXiv:2503.14476) unless `lossType` says otherwise.
- No KL term and no reference model unless `beta` > 0; the reference is the initial model throughout.
- The batch of a step is prompts x generations over all ranks, in contiguous shares of prompts that may differ by one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_workload import environment
from grpo_workload.clock import Clock
from grpo_workload.contract import CONTRACT_PATH, DATA_DIR, ENV_CONTRACT, ENV_DATA_DIR, ENV_STATE_DIR, STATE_DIR, Contract, ExitCode
from grpo_workload.progress import write_phase

# torch, DeepSpeed and vLLM read variables when they are imported that `environment.prepare` sets: functions import what needs them.
if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from grpo_workload.balance import Plan
    from grpo_workload.rank_metrics import RankStep
    from grpo_workload.rollout import Rollout
    from grpo_workload.setup import Run

logger = logging.getLogger(__name__)


def train(run: Run, stop: StopFlag) -> ExitCode:
    """The loop; collective. DONE after maxSteps; STOPPED, with a checkpoint, when any rank was asked to stop before."""
    from transformers import set_seed

    from grpo_workload.balance import micro_batches, plan
    from grpo_workload.checkpoint import TrainerState
    from grpo_workload.collectives import gather
    from grpo_workload.rank_metrics import summarise_ranks
    from grpo_workload.rollout import roll_out
    from grpo_workload.seeds import step_seed

    training, storage = run.config.training, run.config.storage
    num_tokens = run.start.num_tokens
    stopping = False
    for step in range(run.start.step, training.max_steps):
        clock = Clock()
        run.monitor.begin()
        set_seed(step_seed(training.seed, step))

        rollout = roll_out(run, step, clock)
        run.generator.expect_weights()
        run.report.phase("Training")
        work = plan(rollout.facts, training)
        update = run.policy.step(micro_batches(work, rollout.samples, run.rank), work.num_micro_batches, work.scale)
        clock.lap("train")
        run.report.phase("Journalling")
        run.journal.settle()
        clock.lap("journal")

        run.report.phase("Syncing")
        run.generator.sync_weights(run.policy.weights(), step + 1)
        clock.lap("sync")

        run.report.phase("Agreeing")
        ends = gather((stop.is_set, describe_rank(run, rollout, work, clock)))
        clock.lap("agree")
        stopping, ranks = any(asked for asked, _ in ends), [rank for _, rank in ends]

        metrics = summarise_step(run, rollout, num_tokens, clock) | update | summarise_ranks(ranks)
        num_tokens = int(metrics["num_tokens"])
        run.checkpoints.check()
        run.report.step(step, metrics, rollout.samples, ranks)

        if stopping or step + 1 == training.max_steps or (step + 1) % storage.checkpoint_every_steps == 0:
            run.report.phase("Saving")
            state = TrainerState(
                step=step + 1,
                weight_version=step + 1,
                num_tokens=num_tokens,
                world_size=run.world_size,
                zero_stage=run.config.parallelism.zero_stage,
                lora=run.config.adapters,
                origin=run.start.origin,
            )
            run.report.saved(step + 1, run.checkpoints.save(run.policy, run.tokenizer, state))
            run.journal.begin_part()
        if stopping:
            break
    done = not stopping or step + 1 == training.max_steps
    run.report.phase("Done" if done else "Stopped")
    return ExitCode.DONE if done else ExitCode.STOPPED


def summarise_step(run: Run, rollout: Rollout, num_tokens: int, clock: Clock) -> dict[str, float]:
    """Metrics of a step under TRL's names, and how many seconds each part of it took on this rank."""
    from grpo_workload.metrics import summarise

    facts = [fact for own in rollout.facts for fact in own]
    metrics = summarise(
        rollout.table,
        num_generations=run.config.training.num_generations,
        scale_rewards=run.config.training.scale_rewards,
        prompt_lengths=[fact.prompt_tokens for fact in facts],
        completion_lengths=[fact.tokens for fact in facts],
        truncated=[fact.is_truncated for fact in facts],
        step_time=clock.seconds,
        num_tokens_before=num_tokens,
    )
    return metrics | {f"time/{name}": seconds for name, seconds in clock.laps.items()}


def describe_rank(run: Run, rollout: Rollout, work: Plan, clock: Clock) -> RankStep:
    """What this rank did in the step that now ends."""
    from grpo_workload.rank_metrics import RankStep

    tokens = [len(sample.prompt.token_ids) + len(sample.completion.token_ids) for sample in rollout.samples]
    return RankStep(
        rank=run.rank,
        seconds=dict(clock.laps),
        generated_tokens=rollout.generated_tokens,
        sample_tokens=sum(tokens),
        longest_sample_tokens=max(tokens, default=0),
        trained_tokens=work.trained_tokens(run.rank),
        fed_tokens=work.fed_tokens(run.rank),
        device=run.monitor.end(),
    )


class StopFlag:
    """Whether this process was asked to stop (SIGTERM); the loop asks all ranks at the end of each step."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Take over SIGTERM."""
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, *_: Any) -> None:
        self.is_set = True


def main() -> ExitCode:
    """Train as the environment and the contract say."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(name)s: %(message)s")
    contract = Contract.model_validate_json(Path(os.environ.get(ENV_CONTRACT, CONTRACT_PATH)).read_text())
    environment.prepare(contract.device, os.environ, is_engine_split=contract.config.generation.is_split_over_ranks)
    stop = StopFlag()
    data_dir, state_dir = Path(os.environ.get(ENV_DATA_DIR, DATA_DIR)), Path(os.environ.get(ENV_STATE_DIR, STATE_DIR))
    write_phase(state_dir, int(os.environ["RANK"]), "Loading")

    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from grpo_workload.collectives import leave
    from grpo_workload.prompt_making import PromptError
    from grpo_workload.rewards import close_rewards
    from grpo_workload.setup import load

    errors = get_error_handler()
    errors.initialize()
    try:
        with asyncio.Runner() as event_loop:
            try:
                run = load(contract, event_loop, data_dir=data_dir, state_dir=state_dir)
            except ValueError as error:
                return refuse(error, errors)
            # Only now: while it loads, a rank has nothing to save and may as well die of the signal. Libraries put handlers there too.
            stop.install()
            try:
                exit_code = train(run, stop)
            except PromptError as error:  # of rows that nobody has looked at before their step
                return refuse(error, errors)
            except RuntimeError as error:  # of a collective, perhaps, whose other ranks have lost an engine
                raise run.generator.blame(error) from error
            finally:
                run.prompts.close()
                close_rewards(run.rewards)
            run.report.close()
            run.journal.close()
            run.monitor.close()
            run.generator.close()
            leave()
            return exit_code
    except Exception as error:
        errors.record_exception(error)
        raise


def refuse(error: ValueError, errors: ErrorHandler) -> ExitCode:
    """Tell the launcher what the user has to mend."""
    logger.error("%s", error)
    errors.record_exception(error)
    return ExitCode.CONFIG_ERROR


if __name__ == "__main__":
    sys.exit(main())
