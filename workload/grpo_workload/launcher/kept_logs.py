"""The ends of ranks' logs, kept in the run's folder: a pod's log goes with the pod."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path

from grpo_spec.reports import LOGS_FOLDER, Outcome
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.rank_exits import end_of

logger = logging.getLogger(__name__)

LINES = 200  # kept of each log of a rank
BYTES = 32_768
SECONDS = 10.0  # longest wait for the storage: the outcome must not wait for one that hangs


async def keep_logs(place: Place, log_dir: Path, outcome: Outcome) -> None:
    """Write `<run>/logs/<pod>.log`: of the rank that failed, or of the pod's first. A failure of it is only logged.

    Nothing is written to a folder that goes with the pod.
    """
    if not place.contract.durable:
        return
    try:
        await asyncio.wait_for(asyncio.to_thread(_write, place, log_dir, outcome), SECONDS)
    except (OSError, TimeoutError) as error:
        logger.warning("the ends of logs are not kept in %s: %r", place.run_dir, error)


def _write(place: Place, log_dir: Path, outcome: Outcome) -> None:
    rank = place.ranks[0] if outcome.rank is None else outcome.rank
    parts = [f"attempt {outcome.attempt}, ended {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}: {outcome.message}"]
    for kind in ("stdout", "stderr"):
        log = log_dir / f"rank-{rank}.{kind}.log"
        if log.exists() and (lines := end_of(log, BYTES)[-LINES:]):
            parts.append(f"--- the end of rank {rank}'s {kind}\n" + "\n".join(lines))
    folder = place.run_dir / LOGS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{place.pod}.tmp"
    fresh.write_text("\n".join(parts) + "\n")
    fresh.replace(folder / f"{place.pod}.log")
