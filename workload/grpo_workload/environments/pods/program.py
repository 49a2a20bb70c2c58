"""The program of an environment pod: tools and environments of a job in processes, and the server of their sessions.

It belongs to no attempt of the job, and its container begins again whenever it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from grpo_spec.contract import (
    CONTRACT_PATH,
    ENV_CONTRACT,
    ENV_TERMINATION_LOG,
    TERMINATION_LOG,
    EnvironmentPodContract,
)
from grpo_spec.reports import ExitCode, Outcome
from grpo_spec.schema import WITHOUT_RULES
from grpo_workload.environments.pods.server import PodServer

FAILED_SECONDS = 30.0
"""Time that a pod which cannot begin stays, so that ranks which wait for it learn the cause."""
_SHUTDOWN_SECONDS = 2.0


def main() -> int:
    """Serve until SIGTERM. Returns the exit code, and leaves an outcome if tools or environments cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    path = Path(os.environ.get(ENV_CONTRACT, CONTRACT_PATH))
    contract = EnvironmentPodContract.model_validate_json(path.read_text(), context=WITHOUT_RULES)
    if (outcome := asyncio.run(_serve(contract, os.environ))) is None:
        return ExitCode.DONE
    Path(os.environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)).write_text(outcome.to_message())
    return outcome.exit_code


async def _serve(contract: EnvironmentPodContract, environ: Mapping[str, str]) -> Outcome | None:
    server, stop = PodServer(contract), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    await web.TCPSite(runner, port=contract.port).start()
    beginning = asyncio.ensure_future(server.begin(environ))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([beginning, stopping], return_when=asyncio.FIRST_COMPLETED)
        outcome = beginning.result() if beginning.done() else None
        with suppress(TimeoutError):
            async with asyncio.timeout(None if outcome is None else FAILED_SECONDS):
                await stopping
        return outcome
    finally:
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await runner.cleanup()
        server.close()
