"""Fixtures of the trainer tests: a tiny random model, and ranks that run as processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_cli.local.processes import free_ports
from grpo_demo.pretrained import MODELS, install
from support.paths import PROGRAMS
from support.trainer.object_storage import ObjectStorage
from support.trainer.places import contract_json
from support.trainer.rank_server import PYTHONPATH, SERVERS, TRAINING, WITH_VLLM, Rank
from support.trainer.tiny_model import make_tiny_model

DEADLINE = 400.0  # seconds that ranks may take to load torch, DeepSpeed and vLLM on a busy machine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random Llama with 2 layers and 2 heads of size 32, in float32, with a byte tokenizer and ChatML."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def object_storage(tmp_path_factory):
    """A running server of object storage."""
    server = ObjectStorage(tmp_path_factory.mktemp("object-storage"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def storage(object_storage, monkeypatch):
    """That server, with a user's variables."""
    for name, value in object_storage.env.items():
        monkeypatch.setenv(name, value)
    return object_storage


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Folder of SmolLM2-135M-Instruct, in the cache of a hub."""
    return install(MODELS["smollm2"], tmp_path_factory.mktemp("home") / "hub")


StartRank = Callable[[list[str], dict[str, str], int], Rank]


class Ranks:
    """Rank processes with torchrun's variables, without a launcher."""

    def __init__(
        self, start: StartRank, command: list[str], world_size: int, folder: Path, env: dict[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, (port,) = folder, free_ports(1)
        self._logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
        self.processes: list[Rank] = []
        if command[0].endswith(".py"):
            command = [str(PROGRAMS / "as_rank.py"), *command]
        for rank, log in enumerate(self._logs):
            (state_dir := self.state(rank)).mkdir(exist_ok=True)
            rank_env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": PYTHONPATH,
                "TORCHELASTIC_ERROR_FILE": str(state_dir / "error.json"),
                "GRPO_STATE_DIR": str(state_dir),
                "POD_UID": "uid-of-job-0",
                **env,
            }
            with log.open("w") as file:
                self.processes.append(start(command, rank_env, file.fileno()))

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds; fail when a rank ends before, or at the deadline."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, self.logs()
            assert all(process.poll() is None for process in self.processes), self.logs()
            time.sleep(0.05)

    def exit_codes(self) -> list[int]:
        """Wait until all ranks have ended; return their exit codes."""
        end = time.monotonic() + DEADLINE
        return [process.wait(timeout=max(0.0, end - time.monotonic())) for process in self.processes]

    def state(self, rank: int) -> Path:
        """Return the folder of a rank's state."""
        return self._folder / f"state-{rank}"

    def error(self, rank: int = 0) -> str:
        """Return the message of the exception that a rank has ended with."""
        return str(json.loads((self.state(rank) / "error.json").read_text())["message"]["message"])

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self._logs)


@pytest.fixture
def start_ranks(tmp_path, request):
    """Function start_ranks(command, world_size, name, **env); its ranks are killed when the test ends.

    They are forked from a process that has loaded what ranks load; vLLM for tests that are marked with it.
    """
    started: list[Ranks] = []
    modules = WITH_VLLM if request.node.get_closest_marker("vllm") else TRAINING

    def start(command, world_size, name="ranks", **env):
        ranks = Ranks(partial(SERVERS.start, modules), command, world_size, tmp_path / name, env)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.wait()


@pytest.fixture
def run_program(start_ranks, tmp_path):
    """Function run_program(name, world_size, *arguments): runs a file of programs/ as ranks, which all exit with 0.

    It returns each rank's result (programs/results.py), by rank; None for a rank that reports nothing.
    """

    def run(name, world_size, *arguments):
        folder = f"{name}-{world_size}"
        command = [str(PROGRAMS / name), *map(str, arguments)]
        ranks = start_ranks(command, world_size, folder, RESULTS=str(tmp_path / folder))
        assert ranks.exit_codes() == [0] * world_size, ranks.logs()
        paths = [tmp_path / folder / f"result-{rank}.json" for rank in range(world_size)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    return run


@pytest.fixture
def start_training(start_ranks, tmp_path):
    """Function start_training(config, world_size, uid=..., **env); the run's folder is below tmp_path / "data"."""

    def start(config, world_size, *, uid="uid", **env):
        job = {"namespace": "ns", "name": "job", "uid": uid}
        contract = contract_json(config, gpus=world_size, job=job, device="cpu", timeoutSeconds=300)
        path = tmp_path / f"{uid}.json"
        path.write_text(json.dumps(contract))
        env |= {"GRPO_CONTRACT": str(path), "GRPO_DATA_DIR": str(tmp_path / "data")}
        return start_ranks(["-m", "grpo_workload.rank"], world_size, f"train-{uid}", **env)

    return start
