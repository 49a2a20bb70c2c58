"""Prometheus' view of one trainer pod: of the training where rank 0 is, and of the pod's own ranks. docs/metrics.md lists it.

Made anew at each scrape from what the ranks have left in the state folder. When the pod's part has ended, what says how it goes is
gone, and how far it got stays until the pod is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from grpo_workload.contract import Progress
from grpo_workload.progress import read_phase, read_progress, read_rank_step
from grpo_workload.world import Place

MAX_METRICS = 256
"""Names of `grpo_metric`: ours are under a hundred, and user code in a rank must not fill Prometheus."""

_RANK_FIGURES = {
    "generated_tokens_per_second": ("generated_tokens_per_second", "Completion tokens a rank sampled a second, while it generated.", 1.0),
    "trained_tokens_per_second": ("trained_tokens_per_second", "Tokens a rank trained on a second, while it trained.", 1.0),
    "padding_fraction": ("padding_ratio", "Share of what the rank's model was fed that is padding.", 1.0),
    "longest_sample_share": ("longest_sample_ratio", "Tokens of a rank's longest sample over those of all its samples.", 1.0),
    "gpu_utilization": ("gpu_utilization_ratio", "Share of the last step in which any kernel ran on the rank's GPU.", 0.01),
    "memory_used_peak": ("gpu_memory_used_peak_bytes", "Most bytes of the rank's GPU in use by anybody in the last step.", 1.0),
    "memory_allocated_peak": ("gpu_memory_allocated_peak_bytes", "Most bytes in tensors of the rank's torch in the last step.", 1.0),
    "memory_reserved_peak": ("gpu_memory_reserved_peak_bytes", "Most bytes held by the rank's torch in the last step.", 1.0),
}
"""Of `RankStep.as_json`: the metric's name behind grpo_rank_, what it is, and what a value is multiplied by."""


class TrainingCollector(Collector):
    """Gauges of what is known; all carry the job's namespace and name and the pod's name."""

    def __init__(self, place: Place, *, is_ready: Callable[[], bool], has_ended: Callable[[], bool]) -> None:
        """Of the pod at `place`, whose launcher tells whether its ranks run, and whether they have ended."""
        job = place.contract.job
        self._labels = {"namespace": job.namespace, "grpojob": job.name, "pod": place.pod}
        self._place, self._is_ready, self._has_ended = place, is_ready, has_ended

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector."""
        yield self._gauge("ready", "Whether the ranks of this pod run.", float(self._is_ready()))
        yield self._gauge("epoch", "Number of the job's attempt.", self._place.contract.epoch)
        progress = read_progress(self._place.state_dir)
        if progress is not None:  # where rank 0 is
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
            yield self._gauge("checkpoint_step", "Step of the newest checkpoint that this attempt has written.", progress.checkpoint_step)

    def _pace(self, progress: Progress) -> Iterator[GaugeMetricFamily]:
        numbers = {
            "step_age_seconds": ("Seconds since the last step was finished.", progress.age_seconds),
            "step_seconds": ("Median of the last steps' durations, saving included.", progress.step_seconds),
            "reward": ("Mean reward of the last step.", progress.reward),
            "tokens_per_second": ("Completion tokens of all ranks a second, over the last step.", progress.tokens_per_second),
            "weight_version": ("Version of the weights that generate.", progress.weight_version),
        }
        for name, (description, value) in numbers.items():
            if value is not None:
                yield self._gauge(name, description, value)
        metrics = self._family("metric", "The last step's metrics under TRL's names.", "name")
        for name, value in islice(progress.metrics.items(), MAX_METRICS):
            metrics.add_metric([*self._labels.values(), name], value)
        yield metrics

    def _ranks(self) -> Iterator[GaugeMetricFamily]:
        ranks, state_dir = self._place.ranks, self._place.state_dir
        phase_age = self._family("rank_phase_age_seconds", "Seconds for which a rank is in the phase that it is in.", "rank", "phase")
        for rank in ranks:
            if (phase := read_phase(state_dir, rank)) is not None:
                phase_age.add_metric([*self._labels.values(), str(rank), phase[0]], phase[1])
        yield phase_age
        told = {rank: step for rank in ranks if (step := read_rank_step(state_dir, rank)) is not None}
        seconds = self._family("rank_phase_seconds", "Seconds that a rank spent in a phase of the last step.", "rank", "phase")
        for rank, step in told.items():
            for name, value in step["seconds"].items():
                seconds.add_metric([*self._labels.values(), str(rank), name], value)
        yield seconds
        yield from self._figures(told)

    def _figures(self, told: Mapping[int, Mapping[str, Any]]) -> Iterator[GaugeMetricFamily]:
        for key, (name, description, factor) in _RANK_FIGURES.items():
            family = self._family(f"rank_{name}", description, "rank")
            for rank, step in told.items():
                if key in step:
                    family.add_metric([*self._labels.values(), str(rank)], step[key] * factor)
            yield family

    def _family(self, name: str, description: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"grpo_{name}", description, labels=[*self._labels, *labels])

    def _gauge(self, name: str, description: str, value: float) -> GaugeMetricFamily:
        family = self._family(name, description)
        family.add_metric(list(self._labels.values()), value)
        return family
