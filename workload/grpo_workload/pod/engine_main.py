"""The work of an engine pod: start its vLLM servers, watch them, and leave one outcome.

A restarted vLLM server would sample from the initial weights, so a pod starts engines once in an attempt and then holds
(`run_once`). Engines that run go on when a later attempt begins in the pod, unless they are over several pods.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_spec.contract import ENV_POD_NAME, Engine
from grpo_spec.errors import ConfigError
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.pod.contract_file import ContractError, ThisPod
from grpo_workload.pod.device_check import check_devices
from grpo_workload.pod.engines import PodEngines
from grpo_workload.pod.meeting import Meeting, meeting
from grpo_workload.pod.run_once import make_outcome, read_or_refuse, run_once
from grpo_workload.pod.versions import check_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod(ThisPod):
    """An engine pod. Raises ContractError when the contract gives it no engine."""

    def __post_init__(self) -> None:
        if not self.engines:
            names = ", ".join(pod for engine in self.contract.engines for pod in engine.pods) or "none"
            raise ContractError(
                f"{ENV_POD_NAME} {self.pod!r} must name the pod of an engine; the contract has: {names}",
                self.contract.attempt,
            )

    @property
    def engines(self) -> list[Engine]:
        """Engines of this pod."""
        return [engine for engine in self.contract.engines if self.pod in engine.pods]


async def run_engines(pod: EnginePod, engines: PodEngines, stop: asyncio.Event) -> Outcome:
    """Run this pod's engines until one of them ends or `stop` is set. They still run when this returns."""
    stopped, first_exit = asyncio.create_task(stop.wait()), None
    try:
        check_versions(pod.contract)
        await check_devices(pod.contract, pod.pod)
        async with _met(pod, pod.engines[0]) as others:
            ends: set[asyncio.Future[Any]] = {stopped}
            if others is not None:
                await engines.stop()  # those of an earlier attempt: ranks would take them for this one's
                await asyncio.wait({*ends, others.node}, return_when=asyncio.FIRST_COMPLETED)
                ends.add(others.lost)
            if not stopped.done():
                node = others.node.result() if others else None
                ends.add(first_exit := await engines.begin(pod.contract, pod.engines, node))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if first_exit is not None and first_exit.done():
            message = f"pod {pod.pod}: {first_exit.result()}"
            return make_outcome(pod, ExitCode.RANK_FAILED, Reason.ENGINE_DIED, message)
        if others is not None and others.lost.done() and not stopped.done():
            await engines.stop()
            message = f"pod {pod.pod}: pod {others.lost.result()} of the same engine has ended, or does not answer"
            return make_outcome(pod, ExitCode.PEER_LOST, Reason.PEER_LOST, message)
        return make_outcome(pod, ExitCode.STOPPED, Reason.STOPPED, f"pod {pod.pod} and its engines were stopped")
    except ConfigError as error:
        return make_outcome(pod, ExitCode.CONFIG_ERROR, Reason.CONFIG_ERROR, str(error))
    finally:
        stopped.cancel()
        if first_exit is not None:
            first_exit.cancel()


@asynccontextmanager
async def _met(pod: EnginePod, engine: Engine) -> AsyncIterator[Meeting | None]:
    if not engine.followers:
        yield None
        return
    async with meeting(pod, engine) as others:
        yield others


def main() -> int:
    """Run the engine pod that the environment describes, or hold if it has run before. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engines = PodEngines()
    with asyncio.Runner() as runner:
        try:
            while (pod := read_or_refuse(EnginePod, os.environ)) is not None:
                if (outcome := runner.run(run_once(pod, partial(run_engines, pod, engines)))) is not None:
                    return outcome.exit_code
        finally:
            runner.run(engines.stop())
    return ExitCode.CONFIG_ERROR
