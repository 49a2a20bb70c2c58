"""A small job's settings, and two trainer pods of it with three ranks: their places, and what a rank reports."""

from pathlib import Path
from typing import Any

from grpo_spec.contract import Contract
from grpo_spec.trainer import TrainerConfig
from grpo_workload.launcher.place import Place
from grpo_workload.reporting.rank_metrics import DeviceUse, RankStep

CONFIG = {"model": {"name": "m"}, "dataset": {"name": "d"}, "rewards": [{"name": "r", "accuracy": {}}]}
MEMBERS = [
    {"pod": "job-a-0", "group": "a", "host": "h", "gpus": 2, "rankOffset": 0},
    {"pod": "job-b-0", "group": "b", "host": "h", "gpus": 1, "rankOffset": 2},
]
CONTRACT = {
    "job": {"namespace": "ns", "name": "job", "uid": "u"},
    "attempt": 3,
    "device": "cuda",
    "durable": True,
    "config": CONFIG,
}


def config_of(**sections: Any) -> TrainerConfig:
    """Return settings of a job with these sections in place of its own, or besides."""
    return TrainerConfig.model_validate(CONFIG | sections)


def contract_json(config: dict[str, Any], *, gpus: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the contract of one trainer pod, with these sections of its configuration."""
    members = [{"pod": "job-a-0", "group": "a", "host": "127.0.0.1", "gpus": gpus, "rankOffset": 0}]
    return {**CONTRACT, "attempt": 0, "members": members, "config": CONFIG | config, **fields}


def place(folder: Path, pod: str) -> Place:
    """Return the place of `pod`, whose state is in `folder`."""
    (state := folder / pod).mkdir(exist_ok=True)
    contract = Contract.model_validate({**CONTRACT, "members": MEMBERS})
    return Place(contract=contract, pod=pod, pod_uid="u", state_dir=state, termination_log=state / "log")


def rank_step(rank: int) -> RankStep:
    """Return a rank's step with every value that a GPU reports."""
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
