"""What a launcher tells Prometheus, while its ranks train and after they have ended."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from grpo_workload.collector import MAX_METRICS, TrainingCollector
from grpo_workload.contract import Contract, Progress
from grpo_workload.progress import forget_progress, write_phase, write_progress
from grpo_workload.rank_metrics import DeviceUse, RankStep
from grpo_workload.report import RankReport, RunReport
from grpo_workload.world import Place, find_place

CONFIG = {"model": {"name": "m"}, "dataset": {"name": "d"}, "rewards": [{"name": "r", "accuracy": {}}]}
MEMBERS = [
    {"pod": "job-a-0", "group": "a", "host": "h", "gpus": 2, "rankOffset": 0},
    {"pod": "job-b-0", "group": "b", "host": "h", "gpus": 1, "rankOffset": 2},
]
CONTRACT = {"job": {"namespace": "ns", "name": "job", "uid": "u"}, "epoch": 3, "device": "cuda", "durable": True, "config": CONFIG}


def place(folder: Path, pod: str) -> Place:
    (state := folder / pod).mkdir(exist_ok=True)
    contract = Contract.model_validate({**CONTRACT, "members": MEMBERS})
    return find_place(contract, pod_name=pod, pod_uid="u", state_dir=state, termination_log=state / "log")


def rank_step(rank: int) -> RankStep:
    """A rank's step, with all that a GPU tells."""
    device = DeviceUse(gpu_utilization=87.5, memory_used_peak=80, memory_allocated_peak=40, memory_reserved_peak=60)
    return RankStep(
        rank=rank,
        seconds={"generate": 4.0, "train": 2.0, "sync": 0.5},
        generated_tokens=600,
        sample_tokens=1000,
        longest_sample_tokens=250,
        trained_tokens=900,
        fed_tokens=1200,
        device=device,
    )


def told(at: Place, *, ready: bool = True, ended: bool = False) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, read from the text that Prometheus gets; the labels that all carry are checked and left out."""
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
    """One step of two pods, as their ranks report it."""
    first, second = place(folder, "job-a-0"), place(folder, "job-b-0")
    main = RunReport(folder / "run", first.state_dir, total_steps=9, step=0)
    reports = [main, RankReport(first.state_dir, 1), RankReport(second.state_dir, 2)]
    metrics = {"reward": 0.25, "step_time": 2.0, "tokens_per_second": 300.0, "rewards/r/mean": 0.5}
    for report in reports:
        report.phase("Training")
        report.step(0, metrics, [], [rank_step(rank) for rank in range(3)])
    main.saved(1, Path("checkpoints/step-1"))
    main.close()
    return first, second


def test_a_pod_tells_of_its_own_ranks_and_that_of_rank_0_of_the_run(tmp_path: Path) -> None:
    first, second = (told(at) for at in _train(tmp_path))
    assert first["grpo_step"] == [({}, 1.0)]
    assert first["grpo_checkpoint_step"] == [({}, 1.0)]
    assert ({"name": "rewards/r/mean"}, 0.5) in first["grpo_metric"]
    assert [labels["rank"] for labels, _ in first["grpo_rank_gpu_utilization_ratio"]] == ["0", "1"]
    assert second["grpo_rank_gpu_utilization_ratio"] == [({"rank": "2"}, 0.875)]
    assert second["grpo_rank_gpu_memory_used_peak_bytes"] == [({"rank": "2"}, 80.0)]
    assert second["grpo_rank_generated_tokens_per_second"] == [({"rank": "2"}, 150.0)]
    assert ({"rank": "2", "phase": "generate"}, 4.0) in second["grpo_rank_phase_seconds"]
    assert [labels for labels, _ in second["grpo_rank_phase_age_seconds"]] == [{"rank": "2", "phase": "Training"}]
    # A pod without rank 0 knows no step: 0 of 0 would be wrong, and would be summed up with the right one.
    assert not {"grpo_step", "grpo_total_steps", "grpo_step_age_seconds", "grpo_metric"} & second.keys()
    assert second["grpo_epoch"] == [({}, 3.0)]


def test_how_far_a_run_got_stays_when_it_has_ended_and_how_it_goes_does_not(tmp_path: Path) -> None:
    first, _ = _train(tmp_path)
    assert told(first, ready=False, ended=True) == {
        "grpo_ready": [({}, 0.0)],
        "grpo_epoch": [({}, 3.0)],
        "grpo_step": [({}, 1.0)],
        "grpo_total_steps": [({}, 9.0)],
        "grpo_checkpoint_step": [({}, 1.0)],
    }


def test_nothing_of_an_earlier_epoch_is_told(tmp_path: Path) -> None:
    first, _ = _train(tmp_path)
    forget_progress(first.state_dir)
    assert told(first, ready=False).keys() == {"grpo_ready", "grpo_epoch"}


def test_a_rank_on_a_cpu_tells_of_no_gpu(tmp_path: Path) -> None:
    at = place(tmp_path, "job-b-0")
    without = RankStep(
        rank=2,
        seconds={"generate": 1.0, "train": 0.0},
        generated_tokens=1,
        sample_tokens=2,
        longest_sample_tokens=2,
        trained_tokens=0,
        fed_tokens=0,
    )
    RankReport(at.state_dir, 2).step(0, {}, [], [without])
    assert not [name for name in told(at) if "gpu" in name]


@pytest.mark.parametrize("count", [MAX_METRICS, MAX_METRICS + 100])
def test_the_number_of_series_is_bounded(tmp_path: Path, count: int) -> None:
    at = place(tmp_path, "job-a-0")
    write_progress(at.state_dir, Progress(step=1, metrics={f"reward/{number}": 1.0 for number in range(count)}))
    for phase in ("Generating", "Training", "Syncing"):
        write_phase(at.state_dir, 0, phase)
    series = told(at)
    assert len(series["grpo_metric"]) == MAX_METRICS
    assert [labels["phase"] for labels, _ in series["grpo_rank_phase_age_seconds"]] == ["Syncing"]
