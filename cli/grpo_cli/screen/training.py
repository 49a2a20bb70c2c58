"""Progress of a job's training, and ranks that are late. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.progress_status import EvaluationStatus, ExportStatus
from grpo_operator.api.status import GRPOJobStatus
from grpo_spec.reports import Progress
from grpo_spec.words import counted

Object = Mapping[str, Any]

LATE_IMBALANCE = 1.5
"""Show the slowest rank when its own work takes this many times the mean."""
LONG_WAIT = 0.1
"""Show from so many seconds on how long a completion waits for a session of an environment pod."""
STUCK_STEPS = 5
STUCK_SECONDS = 60
"""Warn after this many median step times without a step, at least this long; the operator reports a hang much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """Present answers of the launchers; `note` says why something is missing."""

    progress: Progress | None = None
    metrics: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl, oldest first
    rank_phases: Mapping[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Progress of the training."""

    step: int
    total_steps: int
    step_seconds: float | None
    eta_seconds: float | None  # None while it does not run
    idle_seconds: float | None  # since the last step; None while that is short
    tokens_per_second: float | None
    checkpoint: str
    exported: str  # the newest model for others, and the command that fetches it; empty if there is none
    evaluation: str  # the last one and the best; empty if there was none
    curves: Mapping[str, Sequence[float | None]]  # by name: reward, and accuracy if the job has it
    slowest: str
    episodes: str  # those of the last step; empty in a job without tools and environments
    advice: str  # what would balance ranks and engines


def is_stuck(progress: Progress) -> bool:
    """Whether the last step is so long ago that the phase of each rank is of interest."""
    return (
        progress.age_seconds > max(STUCK_SECONDS, STUCK_STEPS * (progress.step_seconds or 0.0))
        and not progress.waiting_for
    )


def read_training(job: Object, status: GRPOJobStatus, report: LauncherReport, *, is_running: bool) -> Training | None:
    """Return the progress, from the launcher if it answers, else from the status; None when neither has any."""
    known, live = status.progress, report.progress if report.progress and report.progress.total_steps else None
    if known is None and live is None:
        return None
    newest: Any = live or known
    times = [row["step_time"] for row in report.metrics if row.get("step_time") is not None]
    seconds = (live and live.step_seconds) or (statistics.median(times) if times else newest.metrics.get("step_time"))
    # A launcher that has exited told of more steps than the operator has written yet.
    step = newest.step if live or not report.metrics else max(newest.step, report.metrics[-1]["step"] + 1)
    left = newest.total_steps - step
    return Training(
        step=step,
        total_steps=newest.total_steps,
        step_seconds=seconds,
        eta_seconds=left * seconds if is_running and seconds else None,
        idle_seconds=live.age_seconds if is_running and live and is_stuck(live) else None,
        tokens_per_second=newest.tokens_per_second,
        # A launcher knows the checkpoints of its own attempt only.
        checkpoint=_checkpoint(job, newest.checkpoint_step or (known.checkpoint_step if known else None)),
        exported=_exported(job, status.export),
        evaluation=_evaluation((live and EvaluationStatus.read(live.evaluation)) or status.evaluation),
        curves=_curves(report.metrics) or {"reward": [newest.reward]},
        slowest=_slowest(newest.metrics),
        episodes=_episodes(newest.metrics, live.waiting_episodes if live else None),
        # The operator leaves it out while engines that were asked for are missing, of which a launcher does not know.
        advice=(newest.advice or "") if known is None or known.advice else "",
    )


def _checkpoint(job: Object, step: int | None) -> str:
    if not job["spec"].get("storage", {}).get("claimName"):
        return "checkpoints are lost with the pods (no storage.claimName)"
    return f"checkpoint at step {step}" if step else "no checkpoint yet"


def _exported(job: Object, export: ExportStatus | None) -> str:
    if export is None:
        return ""
    step = export.path.rpartition("/step-")[2]
    after = f" after {counted(int(step), 'step')}" if step.isdecimal() else ""  # a rank writes the path, in any form
    return f"exported{after}, {export.bytes:,} bytes: grpo export {job['metadata']['name']} FOLDER"


def _evaluation(evaluation: EvaluationStatus | None) -> str:
    if evaluation is None:
        return ""
    value = "without a value" if evaluation.value is None else f"{evaluation.value:.3f}"
    last = f"{evaluation.metric} {value} after {counted(evaluation.step, 'step')}"
    if evaluation.best_step is None or evaluation.best_metric is None:
        return last
    best = f"best {evaluation.best_metric:.3f} after {evaluation.best_step}"
    if evaluation.best_step == evaluation.step:
        best = "the best so far"
    return f"{last}, {best}"


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    wanted = {"reward": "reward", "accuracy": "rewards/accuracy/mean"}
    return {
        shown: [row.get(name) for row in rows]
        for shown, name in wanted.items()
        if any(row.get(name) is not None for row in rows)
    }


def _episodes(metrics: Mapping[str, float], waiting: int | None) -> str:
    parts = []
    if "episodes/turns/mean" in metrics:
        calls, failed = metrics.get("tools/call_frequency", 0.0), metrics.get("tools/failure_frequency", 0.0)
        seconds = metrics.get("episodes/call_seconds/mean", 0.0)
        parts.append(f"{metrics['episodes/turns/mean']:.1f} turns and {calls:.1f} calls ({failed:.0%} failed)")
        parts.append(f"{seconds:.1f} s in calls")
    if (waited := metrics.get("episodes/wait_seconds/mean", 0.0)) >= LONG_WAIT:
        parts.append(f"{waited:.1f} s until a session was free")
    if retries := metrics.get("episodes/retries"):
        parts.append(f"{retries:.0f} began again")
    if lost := metrics.get("episodes/lost"):
        prefix = "episodes/lost/"
        causes = [f"{count:.0f} {one.removeprefix(prefix)}" for one, count in metrics.items() if one.startswith(prefix)]
        parts.append(f"{lost:.0f} lost ({', '.join(causes)})")
    if waiting:
        parts.append(f"{waiting} of rank 0's pod wait for a session now")
    return " · ".join(parts)


def _slowest(metrics: Mapping[str, float]) -> str:
    if "ranks/slowest" not in metrics or metrics.get("ranks/imbalance", 1.0) < LATE_IMBALANCE:
        return ""
    seconds, imbalance = metrics.get("ranks/slowest_seconds", 0.0), metrics["ranks/imbalance"]
    work = f"{seconds:.1f} s of its own work a step, {imbalance:.1f} times the mean"
    return f"the others wait for rank {metrics['ranks/slowest']:.0f}: {work}"
