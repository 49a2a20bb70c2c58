"""The work of a trainer pod: wait for all trainer pods, start this pod's ranks, watch both, and leave one outcome.

The outcome goes to the state folder, the container's termination message and the exit code.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NoReturn

import yaml

from grpo_spec.deepspeed_config import accelerate_config, deepspeed_config
from grpo_spec.errors import ConfigError
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.launcher.kept_logs import keep_logs
from grpo_workload.launcher.peers import LostPeer, Peers, Timing, peers_of
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.rank_exits import RankExit, result_of
from grpo_workload.launcher.rank_processes import SETTLE_SECONDS, Ranks, log_dir_of
from grpo_workload.launcher.start_ranks import RankStarter
from grpo_workload.launcher.status_server import Status, serving
from grpo_workload.pod.device_check import check_devices
from grpo_workload.pod.engines import running_engines
from grpo_workload.pod.run_once import AttemptRecord, make_outcome, read_or_refuse, run_once
from grpo_workload.pod.versions import check_versions
from grpo_workload.reporting.progress_files import forget_progress, read_progress, write_phase

logger = logging.getLogger(__name__)

RANK = (sys.executable, "-m", "grpo_workload.rank")


async def launch(place: Place, starter: RankStarter, timing: Timing) -> Outcome | None:
    """Run this pod's part of the attempt, with ranks of `starter`, or hold if it has run before.

    Returns None if a later attempt begins in this pod.
    """
    status = Status(place)
    has_run_before = AttemptRecord(place).has_begun
    async with serving(status), peers_of(place, timing) as peers, starter.ahead(place):
        outcome = await run_once(
            place,
            lambda stop: _run(status, peers, starter, stop),
            on_outcome=lambda ended: status.end(ended, is_final=True),
        )
        if outcome is not None and not has_run_before:
            await peers.linger()
    return outcome


async def _run(status: Status, peers: Peers, starter: RankStarter, stop: asyncio.Event) -> Outcome:
    place = status.place
    write_configs(place)
    forget_progress(place.state_dir)
    stopped = asyncio.create_task(stop.wait())
    status.missing = peers.missing
    status.enter("WaitingForPeers")
    gathering = asyncio.create_task(peers.gather())
    await asyncio.wait({gathering, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        gathering.cancel()
        message = f"pod {place.pod} was stopped before its ranks were started"
        return _outcome(place, ExitCode.STOPPED, Reason.STOPPED_EARLY, message)
    if loss := gathering.result():
        return _peer_lost(place, loss)

    logger.info(
        "all %d pods answer; starting ranks %d to %d", len(place.contract.members), place.ranks[0], place.ranks[-1]
    )
    try:
        check_versions(place.contract)
        await check_devices(place.contract, place.pod)
        async with running_engines(place.contract, place.engines) as engine_exit:
            outcome = await _run_ranks(status, peers, starter, stopped, engine_exit)
        await keep_logs(place, log_dir_of(place), outcome)
        return outcome
    except ConfigError as error:
        return _outcome(place, ExitCode.CONFIG_ERROR, Reason.CONFIG_ERROR, str(error))


async def _run_ranks(
    status: Status,
    peers: Peers,
    starter: RankStarter,
    stopped: asyncio.Task[Literal[True]],
    engine_exit: asyncio.Task[str],
) -> Outcome:
    place = status.place
    for rank in place.ranks:
        write_phase(place.state_dir, rank, "Starting")
    ranks = await starter.start(place)
    status.raised = ranks.raised
    status.enter("Loading" if place.is_master else "Running", ready=True)
    settled = asyncio.create_task(ranks.settle())
    watch = asyncio.create_task(peers.watch())
    await asyncio.wait({settled, watch, stopped, engine_exit}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done() and not settled.done():
        logger.info("stopping: the ranks save a checkpoint at the end of their step")
        ranks.ask_to_stop()
        await asyncio.wait({settled, engine_exit}, return_when=asyncio.FIRST_COMPLETED)
    if watch.done() and not settled.done() and ranks.raised():
        # A rank of this pod raised, and the peer was lost because of it: this pod's outcome is that rank's.
        await asyncio.wait({settled}, timeout=peers.timing.raised)
    outcome = None
    if engine_exit.done():
        message = f"pod {place.pod}: {engine_exit.result()}"
        outcome = _outcome(place, ExitCode.RANK_FAILED, Reason.ENGINE_DIED, message)
    elif watch.done() and not stopped.done() and not _has_failed(settled):
        outcome = _peer_lost(place, watch.result())
    watch.cancel()
    if outcome is None:
        return await _after_ranks(status, peers, ranks, settled.result())
    status.end(outcome)
    await ranks.stop(peers.timing.rank_grace)
    return outcome


def _has_failed(settled: asyncio.Task[list[RankExit]]) -> bool:
    return settled.done() and any(one.failed for one in settled.result())


async def _after_ranks(status: Status, peers: Peers, ranks: Ranks, exits: Sequence[RankExit]) -> Outcome:
    result = result_of(exits)
    outcome = _outcome(status.place, result.exit_code, result.reason, result.message, result.rank)
    # Publish it at once and with the time of the failure: peers whose ranks crash because of ours need it to find out
    # which pod failed first.
    status.end(outcome, at=result.at)
    await ranks.stop(peers.timing.rank_grace)
    if result.exit_code != ExitCode.RANK_FAILED or not status.place.others:
        return outcome
    await asyncio.sleep(SETTLE_SECONDS)
    if loss := await peers.earlier_failure(result.at):
        return _peer_lost(status.place, LostPeer(loss.reason, f"{loss.message}; after that, {result.message}"))
    return outcome


def write_configs(place: Place) -> None:
    """Write the configurations of DeepSpeed and accelerate into the state folder, for people to read."""
    (place.state_dir / "deepspeed.json").write_text(json.dumps(deepspeed_config(place.contract.config), indent=1))
    (place.state_dir / "accelerate.yaml").write_text(
        yaml.safe_dump(accelerate_config(place.contract, place.member), sort_keys=False)
    )


def _peer_lost(place: Place, loss: LostPeer) -> Outcome:
    return _outcome(place, ExitCode.PEER_LOST, loss.reason, loss.message)


def _outcome(place: Place, exit_code: ExitCode, reason: Reason, message: str, rank: int | None = None) -> Outcome:
    outcome = make_outcome(place, exit_code, reason, message)
    return outcome.model_copy(update={"rank": rank, "progress": read_progress(place.state_dir)})


def main(command: Sequence[str] = RANK, timing: Timing = Timing()) -> int:
    """Launch the ranks of the pod that the environment describes, in one attempt after another that begin in this pod.

    Returns the exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    runner = asyncio.Runner()
    # Each lookup of a name that does not resolve yet occupies a thread; by default there are few more than cores.
    runner.get_loop().set_default_executor(ThreadPoolExecutor(max_workers=64, thread_name_prefix="lookup"))
    starter = RankStarter(command, timing.ahead)
    try:
        while (place := read_or_refuse(Place, os.environ)) is not None:
            if (outcome := runner.run(launch(place, starter, timing))) is not None:
                return outcome.exit_code
    finally:
        runner.run(starter.close())
    return ExitCode.CONFIG_ERROR


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads: one may hang in a name lookup for a minute."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
