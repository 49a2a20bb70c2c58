"""The first process of a trainer pod: `python -m grpo_workload.launch`.

Reads the contract, waits for all pods of the world, starts this pod's ranks, watches over both, and leaves one outcome behind: in the
state folder, as the container's termination message, and as the exit code. It runs an epoch once; started again, it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NoReturn

import yaml

from grpo_workload.contract import ENV_POD_UID, ENV_TERMINATION_LOG, TERMINATION_LOG, ExitCode, Outcome
from grpo_workload.devices import check_devices
from grpo_workload.engine_process import running
from grpo_workload.launch_config import accelerate_config, deepspeed_config
from grpo_workload.peers import Loss, Peers, Timing, peers_of
from grpo_workload.progress import forget_progress, read_progress, write_phase
from grpo_workload.ranks import AFTERMATH, RankExit, Ranks, judge
from grpo_workload.run_once import RunOnce, launcher_died
from grpo_workload.status_server import Status, serving
from grpo_workload.world import ContractError, Place, read_place

logger = logging.getLogger(__name__)

TRAIN = (sys.executable, "-m", "grpo_workload.train")


async def launch(place: Place, command: Sequence[str] = TRAIN, timing: Timing = Timing()) -> Outcome:  # noqa: B008  # frozen
    """Run this pod's part of the epoch, with `command` as each of its ranks, or hold if it has run before; how it ended."""
    once = RunOnce(place)
    if once.begun and once.result is None:
        once.finish(outcome := launcher_died(place))
        return outcome
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    status = Status(place)
    async with serving(status), peers_of(place, timing) as peers:
        if ended := once.result:
            once.tell(ended)
            status.end(ended, recorded=True)
            logger.info("epoch %d has ended here with %s; waiting to be deleted", ended.epoch, ended.reason)
            await stop.wait()
            return ended
        once.begin()
        write_configs(place)
        forget_progress(place.state_dir)
        outcome = await _run(status, peers, command, stop)
        once.finish(outcome)
        status.end(outcome, recorded=True)
        logger.info("ended with %s: %s", outcome.reason, outcome.message)
        await peers.linger()
    return outcome


async def _run(status: Status, peers: Peers, command: Sequence[str], stop: asyncio.Event) -> Outcome:
    place = status.place
    stopped = asyncio.create_task(stop.wait())
    status.missing = peers.missing
    status.enter("WaitingForPeers")
    gate = asyncio.create_task(peers.gather())
    await asyncio.wait({gate, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        gate.cancel()
        return _outcome(place, ExitCode.STOPPED, "StoppedEarly", f"pod {place.member.pod} was stopped before its ranks were started")
    if loss := gate.result():
        return _peer_lost(place, loss)

    logger.info("all %d pods are there; starting ranks %d to %d", len(place.contract.members), place.ranks[0], place.ranks[-1])
    try:
        await check_devices(place.contract, place.pod)
        async with running(place.contract, place.engines) as engine_end:
            return await _run_ranks(status, peers, command, stopped, engine_end)
    except ValueError as error:
        return _outcome(place, ExitCode.CONFIG_ERROR, "ConfigError", str(error))


async def _run_ranks(
    status: Status, peers: Peers, command: Sequence[str], stopped: asyncio.Task[Literal[True]], engine_end: asyncio.Task[str]
) -> Outcome:
    place = status.place
    for rank in place.ranks:
        write_phase(place.state_dir, rank, "Starting")
    ranks = await Ranks.start(place, command)
    status.enter("Loading" if place.is_master else "Running", ready=True)
    settled = asyncio.create_task(ranks.settled())
    watch = asyncio.create_task(peers.watch())
    await asyncio.wait({settled, watch, stopped, engine_end}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done() and not settled.done():
        logger.info("stopping: the ranks save a checkpoint at the end of their step")
        ranks.ask_to_stop()
        await asyncio.wait({settled, engine_end}, return_when=asyncio.FIRST_COMPLETED)
    outcome = None
    if engine_end.done():
        outcome = _outcome(place, ExitCode.RANK_FAILED, "EngineDied", f"pod {place.pod}: {engine_end.result()}")
    elif watch.done() and not stopped.done():
        outcome = _peer_lost(place, watch.result())
    watch.cancel()
    if outcome is None:
        return await _after_ranks(status, peers, ranks, settled)
    status.end(outcome)
    await ranks.end(peers.timing.rank_grace)
    return outcome


async def _after_ranks(status: Status, peers: Peers, ranks: Ranks, settled: asyncio.Task[list[RankExit]]) -> Outcome:
    verdict = judge(settled.result())
    outcome = _outcome(status.place, verdict.exit_code, verdict.reason, verdict.message, verdict.rank)
    # Told at once, and with the time of the failure: peers whose ranks crash because of ours look for the pod that failed first.
    status.end(outcome, at=verdict.at)
    await ranks.end(peers.timing.rank_grace)
    if verdict.exit_code != ExitCode.RANK_FAILED:
        return outcome
    await asyncio.sleep(AFTERMATH)
    if loss := await peers.culprit(verdict.at):
        return _peer_lost(status.place, Loss(loss.reason, f"{loss.message}; after that, {verdict.message}"))
    return outcome


def write_configs(place: Place) -> None:
    """Leave DeepSpeed's and accelerate's configuration in the state folder, for whoever wants to see what the ranks run under."""
    with contextlib.suppress(ValueError):  # the ranks refuse the same settings, with their fields
        (place.state_dir / "deepspeed.json").write_text(json.dumps(deepspeed_config(place.contract.config), indent=1))
    (place.state_dir / "accelerate.yaml").write_text(yaml.safe_dump(accelerate_config(place.contract, place.member), sort_keys=False))


def _peer_lost(place: Place, loss: Loss) -> Outcome:
    return _outcome(place, ExitCode.PEER_LOST, loss.reason, loss.message)


def _outcome(place: Place, exit_code: ExitCode, reason: str, message: str, rank: int | None = None) -> Outcome:
    return Outcome(
        epoch=place.contract.epoch,
        pod_uid=place.pod_uid,
        exit_code=exit_code,
        reason=reason,
        message=message,
        rank=rank,
        progress=read_progress(place.state_dir),
    )


def _refuse(environ: Mapping[str, str], error: ContractError) -> None:
    outcome = Outcome(
        epoch=error.epoch,
        pod_uid=environ.get(ENV_POD_UID, ""),
        exit_code=ExitCode.CONFIG_ERROR,
        reason="ContractRefused",
        message=str(error),
    )
    Path(environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)).write_text(outcome.to_message())


def main(command: Sequence[str] = TRAIN, timing: Timing = Timing()) -> int:  # noqa: B008  # frozen
    """Launch this pod's ranks as the environment says; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        place = read_place(os.environ)
    except ValueError as error:
        logger.error("%s", error)
        if isinstance(error, ContractError):
            _refuse(os.environ, error)
        return ExitCode.CONFIG_ERROR
    runner = asyncio.Runner()
    # Lookups of names that do not resolve yet occupy a thread each; the default is a few more than the machine has cores.
    runner.get_loop().set_default_executor(ThreadPoolExecutor(max_workers=64, thread_name_prefix="lookup"))
    return runner.run(launch(place, command, timing)).exit_code


def leave(code: int) -> NoReturn:
    """End the process now: the interpreter would first wait for threads, of which one may hang in a name lookup for a minute."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
