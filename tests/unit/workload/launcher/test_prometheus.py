"""Asserts the metrics of a trainer pod: while its ranks train, after they have ended, and how many there can be."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from grpo_spec.reports import Progress
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.prometheus import MAX_METRICS, TrainingCollector
from grpo_workload.reporting.progress_files import forget_progress, write_phase, write_progress, write_waiting
from grpo_workload.reporting.rank_metrics import DeviceUse
from grpo_workload.reporting.run_report import RankReport, RunReport
from support.trainer.places import place, rank_step


def scrape(at: Place, *, ready: bool = True, ended: bool = False) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return samples by name, as Prometheus reads them. Asserts and removes the labels that all samples have."""
    registry = CollectorRegistry()
    registry.register(TrainingCollector(at, is_ready=lambda: ready, has_ended=lambda: ended))
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert [labels.pop(name) for name in ("namespace", "grpojob", "pod")] == ["ns", "job", at.pod]
            found.setdefault(sample.name, []).append((labels, sample.value))
    return found


def _train(folder: Path) -> tuple[Place, Place]:
    """Report one step of all ranks of two pods."""
    first, second = place(folder, "job-a-0"), place(folder, "job-b-0")
    main = RunReport(folder / "run", first.state_dir, total_steps=9, step=0)
    reports = [main, RankReport(first.state_dir, 1), RankReport(second.state_dir, 2)]
    metrics = {"reward": 0.25, "step_time": 2.0, "tokens_per_second": 300.0, "rewards/r/mean": 0.5}
    for report in reports:
        report.phase("Training")
        report.step(0, metrics, [], [rank_step(rank) for rank in range(3)])
    write_waiting(second.state_dir, 2, 7)
    main.saved(1, Path("checkpoints/step-1"))
    main.close()
    return first, second


def test_a_pod_reports_on_its_own_ranks_and_the_pod_of_rank_0_on_the_run(tmp_path: Path) -> None:
    first, second = (scrape(at) for at in _train(tmp_path))
    assert first["grpo_step"] == [({}, 1.0)]
    assert first["grpo_checkpoint_step"] == [({}, 1.0)]
    assert ({"name": "rewards/r/mean"}, 0.5) in first["grpo_metric"]
    assert [labels["rank"] for labels, _ in first["grpo_rank_gpu_utilization_ratio"]] == ["0", "1"]
    assert second["grpo_rank_gpu_utilization_ratio"] == [({"rank": "2"}, 0.875)]
    assert second["grpo_rank_gpu_memory_used_peak_bytes"] == [({"rank": "2"}, 80.0)]
    assert second["grpo_rank_generated_tokens_per_second"] == [({"rank": "2"}, 150.0)]
    assert ({"rank": "2", "phase": "generate"}, 4.0) in second["grpo_rank_phase_seconds"]
    assert second["grpo_rank_waiting_episodes"] == [({"rank": "2"}, 7.0)]
    assert [labels for labels, _ in second["grpo_rank_phase_age_seconds"]] == [{"rank": "2", "phase": "Training"}]
    # A pod without rank 0 reports no step: 0 of 0 would be wrong and would be added to the right number.
    assert not {"grpo_step", "grpo_total_steps", "grpo_step_age_seconds", "grpo_metric"} & second.keys()
    assert second["grpo_attempt"] == [({}, 3.0)]


def test_after_the_end_only_metrics_of_how_far_the_run_got_remain(tmp_path: Path) -> None:
    first, _ = _train(tmp_path)
    assert scrape(first, ready=False, ended=True) == {
        "grpo_ready": [({}, 0.0)],
        "grpo_attempt": [({}, 3.0)],
        "grpo_step": [({}, 1.0)],
        "grpo_total_steps": [({}, 9.0)],
        "grpo_checkpoint_step": [({}, 1.0)],
    }


def test_nothing_of_an_earlier_attempt_is_reported(tmp_path: Path) -> None:
    first, _ = _train(tmp_path)
    forget_progress(first.state_dir)
    assert scrape(first, ready=False).keys() == {"grpo_ready", "grpo_attempt"}


def test_a_rank_on_a_cpu_reports_no_gpu_metrics(tmp_path: Path) -> None:
    at = place(tmp_path, "job-b-0")
    RankReport(at.state_dir, 2).step(0, {}, [], [replace(rank_step(2), device=DeviceUse())])
    assert not [name for name in scrape(at) if "gpu" in name]


@pytest.mark.parametrize("count", [MAX_METRICS, MAX_METRICS + 100])
def test_the_number_of_series_is_bounded(tmp_path: Path, count: int) -> None:
    at = place(tmp_path, "job-a-0")
    write_progress(at.state_dir, Progress(step=1, metrics={f"reward/{number}": 1.0 for number in range(count)}))
    for phase in ("Generating", "Training", "Syncing"):
        write_phase(at.state_dir, 0, phase)
    series = scrape(at)
    assert len(series["grpo_metric"]) == MAX_METRICS
    assert [labels["phase"] for labels, _ in series["grpo_rank_phase_age_seconds"]] == ["Syncing"]
