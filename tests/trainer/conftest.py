"""The tiny random model that all trainer tests share, and ranks as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_cli.local import free_ports
from grpo_workload.tiny import make_tiny_model

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 400.0  # seconds for ranks that load torch, DeepSpeed and vLLM on a busy machine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama of 2 layers and 2 heads of size 32, float32, with a byte tokenizer and a ChatML template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


class Ranks:
    """Processes with torchrun's variables, without a launcher."""

    def __init__(self, command: list[str], world_size: int, folder: Path, env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self._logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
        self.processes = []
        for rank, log in enumerate(self._logs):
            state_dir = folder / f"state-{rank}"
            state_dir.mkdir(exist_ok=True)
            rank_env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
                "TORCHELASTIC_ERROR_FILE": str(state_dir / "error.json"),
                "GRPO_STATE_DIR": str(state_dir),
                "POD_UID": "uid-of-job-0",
                **env,
            }
            with log.open("w") as file:
                self.processes.append(subprocess.Popen([sys.executable, *command], env=rank_env, stdout=file, stderr=subprocess.STDOUT))

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds; fails when a rank ends first, or at the deadline."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, self.logs()
            assert all(process.poll() is None for process in self.processes), self.logs()
            time.sleep(0.05)

    def exit_codes(self) -> list[int]:
        """Wait for all ranks."""
        end = time.monotonic() + DEADLINE
        return [process.wait(timeout=max(0.0, end - time.monotonic())) for process in self.processes]

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self._logs)


StartRanks = Callable[..., Ranks]


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[StartRanks]:
    """start_ranks(command, world_size, name, **env): ranks that are killed when the test ends."""
    started: list[Ranks] = []

    def start(command: list[str], world_size: int, name: str = "ranks", **env: str) -> Ranks:
        ranks = Ranks(command, world_size, tmp_path / name, env)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.wait()


@pytest.fixture
def run_program(start_ranks: StartRanks) -> Callable[..., None]:
    """run_program(name, world_size, *arguments): ranks of a file in programs/, which must all end with 0."""

    def run(name: str, world_size: int, *arguments: object) -> None:
        ranks = start_ranks([str(PROGRAMS / name), *map(str, arguments)], world_size, f"{name}-{world_size}")
        assert ranks.exit_codes() == [0] * world_size, ranks.logs()

    return run


@pytest.fixture
def start_training(start_ranks: StartRanks, tmp_path: Path) -> Callable[..., Ranks]:
    """start_training(config, world_size, uid=..., **env): ranks of grpo_workload.train, their data folder below tmp_path / "data"."""

    def start(config: dict[str, Any], world_size: int, *, uid: str = "uid", **env: str) -> Ranks:
        contract = {
            "contractVersion": 1,
            "job": {"namespace": "ns", "name": "job", "uid": uid},
            "epoch": 0,
            "device": "cpu",
            "members": [{"pod": "job-0", "group": "a", "host": "127.0.0.1", "gpus": world_size, "rankOffset": 0}],
            "timeoutSeconds": 300,
            "durable": True,
            "config": config,
        }
        path = tmp_path / f"{uid}.json"
        path.write_text(json.dumps(contract))
        env |= {"GRPO_CONTRACT": str(path), "GRPO_DATA_DIR": str(tmp_path / "data")}
        return start_ranks(["-m", "grpo_workload.train"], world_size, f"train-{uid}", **env)

    return start
