"""Real vLLM servers for tests: `Engines` writes a contract and starts `grpo_workload.engine_process` for each pod."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from launcher import eventually, free_ports
from torch import Tensor

from grpo_workload.contract import Contract, Engine
from grpo_workload.exports import Export, full
from grpo_workload.types import Completion, Prompt

PROMPTS = ([5, 17, 80, 33], [100, 42, 7, 9, 250, 61], [12, 13])


def make_contract(
    model: Path, sizes: Sequence[tuple[int, int]], *, timeout: int = 400, restarts: bool = False, **generation: Any
) -> Contract:
    """One rank on this machine, and an engine on a pod of its own for each pair of (tensor, data) parallel sizes, in one transfer group."""
    *ports, transfer_port, status_port, master_port = free_ports(len(sizes) + 3)
    engines, offset = [], 1
    for index, ((tensor, data), port) in enumerate(zip(sizes, ports, strict=True)):
        engine = {"name": f"engine-{index}", "pod": f"engine-{index}", "group": "generation", "host": "127.0.0.1", "port": port}
        parallel = {"tensorParallel": tensor, "dataParallel": data, "devices": list(range(tensor * data))}
        engines.append({**engine, **parallel, "rankOffset": offset})
        offset += tensor * data
    settings = {"topology": "Server", "maxModelLen": 128, "kvCacheMemory": "64Mi", "engineArgs": {"enforce_eager": True}}
    return Contract.model_validate(
        {
            "job": {"namespace": "ns", "name": "job", "uid": "u"},
            "epoch": 0,
            "device": "cpu",
            "members": [
                {"pod": "learner-0", "group": "learner", "host": "127.0.0.1", "statusPort": status_port, "gpus": 1, "rankOffset": 0}
            ],
            "engines": engines,
            "transfers": [{"sender": 0, "host": "127.0.0.1", "port": transfer_port, "worldSize": offset}],
            "masterPort": master_port,
            "timeoutSeconds": timeout,
            "restartEngines": restarts,
            "durable": False,
            "config": {
                "model": {"path": str(model), "dtype": "float32"},
                "dataset": {"name": "d"},
                "rewards": [{"name": "r", "accuracy": {}}],
                "training": {"maxCompletionLength": 8},
                "generation": settings | generation,
            },
        }
    )


def with_ranks(contract: Contract, ranks: int) -> Contract:
    """The same engines for another number of trainer ranks, which meet them at another port."""
    (port,) = free_ports(1)
    members = tuple(member.model_copy(update={"gpus": ranks}) for member in contract.members)
    transfers = tuple(group.model_copy(update={"port": port}) for group in contract.transfers)
    return contract.model_copy(update={"members": members, "transfers": transfers})


def weights_of(model: Any) -> Export:
    """What is pushed of a transformers model."""
    return Export(full(model), is_partitioned=False)


def own_logprobs(model: Any, prompt: Prompt, completion: Completion) -> Tensor:
    """What a transformers model says of a completion's tokens, in float32 on the host: [tokens]."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=model.device)
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1].float().log_softmax(dim=-1)
    return scores.gather(1, ids[0, len(prompt.token_ids) :].unsqueeze(1)).squeeze(1).cpu()


class Engines:
    """The engine pods of a contract. What a killed launcher leaves is ended by `close`: every process of a pod is in one of its groups."""

    def __init__(self, folder: Path, contract: Contract) -> None:
        self.folder, self.contract = folder, contract
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "contract.json").write_text(contract.model_dump_json(by_alias=True))

    def start(self, engine: Engine) -> subprocess.Popen[bytes]:
        """Start the container of an engine's pod once more."""
        state = self.folder / engine.pod
        state.mkdir(exist_ok=True)
        environ = {
            "GRPO_CONTRACT": str(self.folder / "contract.json"),
            "GRPO_STATE_DIR": str(state),
            "GRPO_TERMINATION_LOG": str(self.termination_log(engine)),
            "POD_NAME": engine.pod,
            "POD_UID": f"uid-of-{engine.pod}",
            "OMP_NUM_THREADS": "1",
        }
        with self.log(engine).open("ab") as log:
            command = [sys.executable, "-m", "grpo_workload.engine_process"]
            process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT)
        self.processes[engine.name] = process
        return process

    def kill(self, engine: Engine) -> None:
        """Kill an engine as if its node were gone: server, workers and launcher."""
        launcher = self.processes[engine.name]
        launcher.send_signal(signal.SIGSTOP)  # so that it records nothing
        os.killpg(self.server(engine), signal.SIGKILL)
        launcher.kill()
        launcher.wait()

    def replace(self, engine: Engine) -> subprocess.Popen[bytes]:
        """Start a new pod of an engine's name, with nothing on its disk."""
        shutil.rmtree(self.folder / engine.pod)
        return self.start(engine)

    def log(self, engine: Engine) -> Path:
        return self.folder / f"{engine.pod}.log"

    def termination_log(self, engine: Engine) -> Path:
        return self.folder / f"{engine.pod}.termination-log"

    def server(self, engine: Engine) -> int:
        """Process id of an engine's vLLM server."""
        launcher = self.processes[engine.name].pid
        children = eventually(lambda: Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split(), "the launcher starts vLLM")
        return int(children[0])

    def close(self) -> None:
        """Stop all pods."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(30)
