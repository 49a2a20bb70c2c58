"""Prometheus metrics of one trainer pod, which docs/metrics.md lists. The pod of rank 0 also reports on the training.

Each scrape reads what the ranks wrote into the state folder. After the pod's part of the attempt has ended, only the
metrics of how far it got remain, until the pod is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from grpo_spec.reports import Progress
from grpo_workload.launcher.place import Place
from grpo_workload.reporting.progress_files import read_phase, read_progress, read_rank_step, read_waiting

MAX_METRICS = 256
"""Most names of `grpo_metric`. Ours are under a hundred; the limit keeps user code from flooding Prometheus."""

_RANK_METRICS = {
    "generated_tokens_per_second": (
        "generated_tokens_per_second",
        "Completion tokens that a rank sampled per second while it generated.",
        1.0,
    ),
    "trained_tokens_per_second": (
        "trained_tokens_per_second",
        "Tokens that a rank trained on per second while it trained.",
        1.0,
    ),
    "padding_fraction": ("padding_ratio", "Share of padding in the tokens fed to the rank's model.", 1.0),
    "longest_sample_share": (
        "longest_sample_ratio",
        "Tokens of the rank's longest sample divided by tokens of all its samples.",
        1.0,
    ),
    "gpu_utilization": (
        "gpu_utilization_ratio",
        "Share of the last step during which any kernel ran on the rank's GPU.",
        0.01,
    ),
    "memory_used_peak": (
        "gpu_memory_used_peak_bytes",
        "Peak bytes in use on the rank's GPU, by any process, in the last step.",
        1.0,
    ),
    "memory_allocated_peak": (
        "gpu_memory_allocated_peak_bytes",
        "Peak bytes in tensors of the rank's torch in the last step.",
        1.0,
    ),
    "memory_reserved_peak": (
        "gpu_memory_reserved_peak_bytes",
        "Peak bytes reserved by the rank's torch in the last step.",
        1.0,
    ),
}
"""Key of `RankStep.as_json` -> name after grpo_rank_, help text, and factor to multiply values with."""


class TrainingCollector(Collector):
    """Collects gauges, each labelled with the job's namespace and name and the pod's name."""

    def __init__(self, place: Place, *, is_ready: Callable[[], bool], has_ended: Callable[[], bool]) -> None:
        """Collect for the pod at `place`; the launcher knows whether its ranks run (`is_ready`) or have ended."""
        job = place.contract.job
        self._labels = {"namespace": job.namespace, "grpojob": job.name, "pod": place.pod}
        self._place, self._is_ready, self._has_ended = place, is_ready, has_ended

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector."""
        yield self._gauge("ready", "1 while the ranks of this pod run, else 0.", float(self._is_ready()))
        yield self._gauge("attempt", "Number of the attempt.", self._place.contract.attempt)
        progress = read_progress(self._place.state_dir)
        if progress is not None:  # rank 0 is in this pod
            yield from self._reached(progress)
        if self._has_ended():
            return
        if progress is not None:
            yield from self._pace(progress)
        yield from self._ranks()

    def _reached(self, progress: Progress) -> Iterator[GaugeMetricFamily]:
        yield self._gauge("step", "Optimizer steps finished.", progress.step)
        yield self._gauge("total_steps", "Optimizer steps to take.", progress.total_steps)
        if progress.checkpoint_step is not None:
            yield self._gauge(
                "checkpoint_step",
                "Step of the newest checkpoint that this attempt wrote.",
                progress.checkpoint_step,
            )

    def _pace(self, progress: Progress) -> Iterator[GaugeMetricFamily]:
        numbers = {
            "step_age_seconds": ("Seconds since the last step finished.", progress.age_seconds),
            "step_seconds": ("Median duration of the last steps, including saving.", progress.step_seconds),
            "reward": ("Mean reward of the last step.", progress.reward),
            "tokens_per_second": (
                "Completion tokens of all ranks per second, over the last step.",
                progress.tokens_per_second,
            ),
            "weight_version": ("Version of the weights that generation uses.", progress.weight_version),
        }
        for name, (description, value) in numbers.items():
            if value is not None:
                yield self._gauge(name, description, value)
        metrics = self._family("metric", "Metrics of the last step, under TRL's names.", "name")
        for name, value in islice(progress.metrics.items(), MAX_METRICS):
            metrics.add_metric([*self._labels.values(), name], value)
        yield metrics

    def _ranks(self) -> Iterator[GaugeMetricFamily]:
        ranks, state_dir = self._place.ranks, self._place.state_dir
        phase_age = self._family(
            "rank_phase_age_seconds", "Seconds since a rank entered its current phase.", "rank", "phase"
        )
        for rank in ranks:
            if (phase := read_phase(state_dir, rank)) is not None:
                phase_age.add_metric([*self._labels.values(), str(rank), phase[0]], phase[1])
        yield phase_age
        steps = {rank: step for rank in ranks if (step := read_rank_step(state_dir, rank)) is not None}
        waiting = self._family(
            "rank_waiting_episodes", "Episodes of a rank that wait for a session of an environment pod.", "rank"
        )
        for rank in ranks:
            if (count := read_waiting(state_dir, rank)) is not None:
                waiting.add_metric([*self._labels.values(), str(rank)], count)
        yield waiting
        seconds = self._family(
            "rank_phase_seconds", "Seconds that a rank spent in each phase of the last step.", "rank", "phase"
        )
        for rank, step in steps.items():
            for name, value in step["seconds"].items():
                seconds.add_metric([*self._labels.values(), str(rank), name], value)
        yield seconds
        yield from self._of_last_step(steps)

    def _of_last_step(self, steps: Mapping[int, Mapping[str, Any]]) -> Iterator[GaugeMetricFamily]:
        for key, (name, description, factor) in _RANK_METRICS.items():
            family = self._family(f"rank_{name}", description, "rank")
            for rank, step in steps.items():
                if key in step:
                    family.add_metric([*self._labels.values(), str(rank)], step[key] * factor)
            yield family

    def _family(self, name: str, description: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"grpo_{name}", description, labels=[*self._labels, *labels])

    def _gauge(self, name: str, description: str, value: float) -> GaugeMetricFamily:
        family = self._family(name, description)
        family.add_metric(list(self._labels.values()), value)
        return family
