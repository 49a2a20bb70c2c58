"""Launchers of fake pods: one server that answers at the addresses of all of them, for jobs that make a step now and
then.

    python -m benchmarks.control_plane.launchers --port 29502
"""

from __future__ import annotations

import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import click
from aiohttp import web

from grpo_spec.reports import Progress
from grpo_spec.schema import dump

POD_NETWORK = "10.0.0.0/16"
"""The range from which KWOK takes addresses of pods: its default, and what follows when that is used up."""

STEP_SECONDS, STEPS = 30, 100_000
METRICS = 40
"""About as many as a run with two rewards and an evaluation reports."""


@contextmanager
def launchers(port: int) -> Iterator[None]:
    """Answer for all pods during the block. The addresses become this machine's own meanwhile, which needs root."""
    route = ("local", POD_NETWORK, "dev", "lo")
    subprocess.run(["ip", "route", "replace", *route], check=True)
    try:
        with subprocess.Popen([sys.executable, "-m", __spec__.name, "--port", str(port)]) as server:
            try:
                yield
            finally:
                server.kill()
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)


def progress(address: str, now: float) -> Progress:
    """Return what the launcher at an address reports: the steps of different ones end at different times."""
    number, age = divmod(now + zlib.crc32(address.encode()) % STEP_SECONDS, STEP_SECONDS)
    step = int(number) % STEPS
    saved = step // 100 * 100
    return Progress(
        step=step,
        total_steps=STEPS,
        phase="Generating",
        age_seconds=age,
        idle_seconds=0.1,
        step_seconds=STEP_SECONDS,
        rank_phases={"0": "Generating for 3 s"},
        reward=step % 997 / 997,
        metrics={f"rewards/function_{one}/mean": (step + one) % 991 / 991 for one in range(METRICS)},
        tokens_per_second=12345.6,
        weight_version=step,
        checkpoint_step=saved,
        checkpoint=f"checkpoints/step-{saved}",
    )


async def _answer(request: web.Request) -> web.Response:
    return web.json_response(dump(progress(request.url.host or "", time.time())))


@click.command()
@click.option("--port", type=int, required=True)
def main(port: int) -> None:
    """Answer until killed."""
    app = web.Application()
    app.router.add_get("/progress", _answer)
    web.run_app(app, port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
