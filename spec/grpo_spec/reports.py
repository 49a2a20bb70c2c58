"""Reports of pods: exit codes, texts in JSON, and the names of a run's files.

Each pod ends with an `Outcome` (the container's termination message); launchers of trainer pods serve `Progress` over
HTTP.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice

from pydantic import Field

from grpo_spec import lenient
from grpo_spec.schema import Section

RUN_FILES = ("metrics", "ranks", "completions")
"""Files of a run's folder, each as <name>.jsonl."""
LOGS_FOLDER = "logs"
"""Folder in a run's folder with the end of each trainer pod's log, as <pod>.log."""

WAITS_FOR_HUB = "waits for the hub: "
"""Begins a line of `plan` and `check_model` on standard error that the command line passes on."""


class ExitCode(IntEnum):
    """The end of a launcher or rank. Values are those of sysexits.h; 1 and 2 are left to crashes of Python itself."""

    DONE = 0
    CONFIG_ERROR = 64
    PEER_LOST = 69
    RANK_FAILED = 70
    NOT_FINITE = 71  # of a rank alone: its pod ends with RANK_FAILED
    WEIGHTS_DIFFER = 72  # of a rank alone: its pod ends with RANK_FAILED
    OUT_OF_MEMORY = 73  # of a rank alone: its pod ends with RANK_FAILED
    ENVIRONMENT_FAILED = 74  # of a rank alone: its pod ends with RANK_FAILED
    STOPPED = 75


class RunWarning(Section):
    """Something that a person should look at while the training goes on."""

    reason: str = Field(description="One of `Reason`, for example NoRewardDifference.")
    message: str = Field(description="What was seen, in which steps, and what to look at.")


class EvaluationProgress(Section):
    """The last evaluation, and the best one."""

    step: int = Field(description="Number of steps taken before it.")
    metric: str = Field(description="Name of the metric that says which one is the best.")
    value: float | None = None
    best_step: int | None = None
    best: float | None = None
    stops: bool = Field(False, description="Whether the run ends with it: evaluation.earlyStoppingPatience.")


class ExportProgress(Section):
    """The newest model that was written for others (storage.export)."""

    path: str = Field(description="Its folder, relative to the data folder.")
    bytes: int = Field(0, description="Size of its files together.")


class GpuUse(Section):
    """GPU seconds of an attempt since its first step began, of all ranks and engines together."""

    attempt: int = Field(-1, description="The attempt; a launcher may still answer what an earlier one reported.")
    training: float = Field(0.0, description="In the forward and backward passes and the optimizer of ranks.")
    sampling: float = Field(0.0, description="In which ranks, or engines that had requests, sampled.")
    waiting: float = Field(0.0, description="Of ranks: for completions of others' GPUs, rewards, other ranks, storage.")
    idle: float = Field(0.0, description="Of engines that had no request.")


_MOST_TEXT, _MOST_ITEMS = 128, 128
"""Bounds of what is read of a report: bytes of a text, items of a list."""


class Progress(Section):
    """The progress of training. Rank 0 writes it at every step; each launcher serves it, with its own ranks' phases, as
    GET /progress.
    """

    step: int = 0
    total_steps: int = 0
    phase: str = Field(
        "Starting",
        description="Starting, WaitingForPeers, then the phase of rank 0: see `grpo_workload.reporting.run_report`.",
    )
    age_seconds: float = Field(0.0, description="Seconds since the last step finished; the server fills it in.")
    idle_seconds: float | None = Field(
        None,
        description="Seconds since a rank of this pod last entered a phase, sampled a token or scored an answer; the "
        "server fills it in.",
    )
    step_seconds: float | None = Field(
        None, description="Median duration of the last steps, including saving; None before the first step ends."
    )
    rank_phases: dict[str, str] = Field(
        default_factory=dict,
        description="Phase of each rank of this pod, by global rank, for example `Generating for 1830 s`; the server "
        "fills it in.",
    )
    waiting_episodes: int | None = Field(
        None,
        description="Episodes of this pod's ranks that wait for a session of an environment pod; the server fills it "
        "in.",
    )
    waiting_for: tuple[str, ...] = Field((), description="Pods not reached yet, each with the cause.")
    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict, description="Metrics of the last step, under TRL's names.")
    warnings: tuple[RunWarning, ...] = Field((), description="Odd findings about the last steps, the worst first.")
    advice: str | None = Field(
        None, description="Who waits for whom, ranks or engines, and what to change; None if nothing is known or wrong."
    )
    tokens_per_second: float | None = None
    gpu_use: GpuUse | None = Field(None, description="As of the last step; None before the first one ends.")
    weight_version: int | None = None
    evaluation: EvaluationProgress | None = None
    checkpoint_step: int | None = None
    checkpoint: str | None = Field(None, description="Path of the newest checkpoint, relative to the data folder.")
    export: ExportProgress | None = None

    @classmethod
    def read(cls, raw: object) -> Progress:
        """Read what a pod reports. Its image is the user's, so it may be any JSON: see `lenient`."""
        said = lenient.read(cls, lenient.plain(raw))
        phases = {rank: phase for rank, phase in said.rank_phases.items() if rank.isdecimal() and len(rank) < 8}
        metrics = {name: value for name, value in said.metrics.items() if len(name) <= _MOST_TEXT}
        return said.model_copy(
            update={
                "phase": lenient.clip(said.phase, _MOST_TEXT),
                "rank_phases": {r: lenient.clip(phases[r], _MOST_TEXT) for r in islice(phases, _MOST_ITEMS)},
                "waiting_for": tuple(lenient.clip(pod, 4 * _MOST_TEXT) for pod in said.waiting_for[:_MOST_ITEMS]),
                "metrics": dict(islice(metrics.items(), 8 * _MOST_ITEMS)),
                "warnings": tuple(
                    RunWarning(reason=lenient.clip(one.reason, _MOST_TEXT), message=lenient.clip(one.message, 1024))
                    for one in said.warnings[:8]
                ),
                "advice": said.advice and lenient.clip(said.advice, 512),
                "evaluation": said.evaluation
                and said.evaluation.model_copy(update={"metric": lenient.clip(said.evaluation.metric, _MOST_TEXT)}),
                "checkpoint": said.checkpoint and lenient.clip(said.checkpoint, 1024),
                "export": said.export and said.export.model_copy(update={"path": lenient.clip(said.export.path, 1024)}),
            }
        )


class Outcome(Section):
    """The end of a pod's part of an attempt. The container's termination message holds it, cut by `to_message`."""

    attempt: int
    pod_uid: str = ""
    exit_code: ExitCode
    reason: str = Field(description="One of `Reason`, for example RankFailed.")
    message: str = Field(description="Failure, its cause and its cure.")
    rank: int | None = None
    progress: Progress | None = None

    def to_message(self) -> str:
        """JSON of at most 4096 bytes, Kubernetes' limit for a termination message; `message` is cut in the middle.

        Of the progress, steps, checkpoint, export and the use of GPUs are kept in any case: they say where the attempt
        ended.
        """
        outcome, keep = self, len(self.message)
        where = self.progress and Progress(
            step=self.progress.step,
            total_steps=self.progress.total_steps,
            gpu_use=self.progress.gpu_use,
            checkpoint=self.progress.checkpoint,
            checkpoint_step=self.progress.checkpoint_step,
            export=self.progress.export,
        )
        while len((text := outcome.model_dump_json(by_alias=True, exclude_none=True)).encode()) > 4096:
            keep = keep * 3 // 4
            message = f"{self.message[: keep // 2]} [...] {self.message[len(self.message) - keep // 2 :]}"
            outcome = self.model_copy(update={"message": message, "progress": where})
        return text
