"""The parts of the status that come from the reports of rank 0: progress, and evaluations."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Annotated

from pydantic import Field

from grpo_operator.api.status_section import StatusSection
from grpo_operator.api.times import Time
from grpo_spec.reports import EvaluationProgress, ExportProgress, Progress

MAX_METRICS = 128
"""Most metrics that the status shows."""


class ProgressStatus(StatusSection):
    """The last progress that rank 0 reported."""

    step: int = Field(0, description="Number of optimizer steps done.")
    total_steps: int = Field(0, description="Number of optimizer steps of the whole run.")
    reward: float | None = Field(None, description="Mean reward of the last step.")
    metrics: dict[Annotated[str, Field(max_length=128)], float] = Field(
        default_factory=dict,
        max_length=MAX_METRICS,
        description="Metrics of the last step, under TRL's names; if there are too many, those of single rewards are "
        "left out first.",
    )
    tokens_per_second: float | None = Field(
        None, description="Completion tokens generated and trained per second, in the last step."
    )
    advice: str | None = Field(
        None,
        max_length=512,
        description="Whether ranks wait for engines or engines for ranks, and what would balance them; absent while it "
        "is unknown, and if neither waits long.",
    )
    weight_version: int | None = Field(None, description="Version of the weights that generation uses.")
    checkpoint_step: int | None = Field(None, description="Step of the newest checkpoint.")
    time: Time = Field(description="Time when the operator read this progress.")

    @classmethod
    def read(cls, progress: Progress, now: datetime) -> ProgressStatus:
        """Return the part of a launcher's report that the status shows, with rounded numbers."""
        of_the_job_first = sorted(progress.metrics.items(), key=lambda metric: metric[0].startswith("rewards/"))
        rounded = {name: float(f"{value:.6g}") for name, value in islice(of_the_job_first, MAX_METRICS)}
        return cls(
            step=progress.step,
            total_steps=progress.total_steps,
            reward=None if progress.reward is None else round(progress.reward, 4),
            metrics=rounded,
            tokens_per_second=None if progress.tokens_per_second is None else round(progress.tokens_per_second, 1),
            advice=progress.advice,
            weight_version=progress.weight_version,
            checkpoint_step=progress.checkpoint_step,
            time=now,
        )


class EvaluationStatus(StatusSection):
    """The last evaluation that rank 0 reported, and the best one."""

    step: int = Field(description="Number of steps taken before the last evaluation.")
    metric: str = Field(max_length=128, description="Name of the metric: evaluation.metricForBestModel.")
    value: float | None = Field(None, description="Its value in the last evaluation.")
    best_step: int | None = Field(None, description="Number of steps taken before the best evaluation.")
    best_metric: float | None = Field(None, description="Value of the metric in the best evaluation.")
    stops: bool = Field(
        False,
        exclude_if=lambda stops: not stops,
        description="Whether evaluation.earlyStoppingPatience ended the training.",
    )

    @property
    def why_stopped(self) -> str:
        """Return why the training ended before its last step, for the end of a sentence; empty if it did not."""
        return f", because {self.metric} was best after step {self.best_step}" if self.stops else ""

    @classmethod
    def read(cls, said: EvaluationProgress | None) -> EvaluationStatus | None:
        """Return what the status shows of a launcher's report, with rounded numbers."""
        if said is None:
            return None
        value, best = (None if one is None else float(f"{one:.6g}") for one in (said.value, said.best))
        return cls(
            step=said.step,
            metric=said.metric,
            value=value,
            best_step=said.best_step,
            best_metric=best,
            stops=said.stops,
        )


class ExportStatus(StatusSection):
    """The newest model that was written for others."""

    path: str = Field(max_length=1024, description="Its folder, as a path below the claim's storage.subPath.")
    bytes: int = Field(0, description="Size of its files together.")

    @classmethod
    def read(cls, said: ExportProgress | None) -> ExportStatus | None:
        """Return what the status shows of a launcher's report."""
        return None if said is None else cls(path=said.path, bytes=said.bytes)


class DownloadStatus(StatusSection):
    """The download before the first attempt (cache.prefetch): its tries so far."""

    since: Time = Field(description="Time when it first began; cache.prefetchDeadlineSeconds counts from it.")
    failures: int = Field(
        0,
        exclude_if=lambda failures: not failures,
        description="Number of tries that failed; the wait before the next one doubles with each.",
    )
    retry_time: Time | None = Field(
        None, description="Earliest time of the next try; absent while one is under way or begins."
    )
    message: str = Field(
        "", max_length=4096, exclude_if=lambda message: not message, description="Cause of the last failure."
    )
