"""Real vLLM servers for tests: `Engines` writes a contract and runs an engine pod's first process for each pod."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spec.contract import Contract, Device, Engine
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.generator import ServerGenerator
from grpo_workload.weights.export import Export, full
from support.paths import PROGRAMS
from support.trainer.launchers import eventually, free_ports
from support.trainer.places import contract_json
from support.trainer.rank_server import PYTHONPATH, SERVERS, WITH_VLLM, Rank

Launcher = subprocess.Popen[bytes] | Rank
POLL = 0.2  # seconds between two checks that the launchers run
PROMPTS = ([5, 17, 80, 33], [100, 42, 7, 9, 250, 61], [12, 13])


def prompts() -> list[Prompt]:
    """Return PROMPTS, without seeds."""
    return [Prompt(index=index, text="", token_ids=tuple(ids)) for index, ids in enumerate(PROMPTS)]


def make_contract(
    model: Path,
    sizes: Sequence[tuple[int, int]],
    *,
    timeout: int = 400,
    restarts: bool = False,
    elastic: Sequence[int] = (),
    **generation: Any,
) -> Contract:
    """Return a contract with one rank, and an engine on its own pod for each pair of (tensor, data) parallel sizes.

    All engines are in one transfer group; everything runs on this machine. `elastic`: positions of elastic engines.
    """
    *ports, transfer_port, status_port, master_port = free_ports(len(sizes) + 3)
    here, engines = {"host": "127.0.0.1"}, []
    for index, ((tensor, data), port) in enumerate(zip(sizes, ports, strict=True)):
        engine = here | {"name": f"engine-{index}", "pod": f"engine-{index}", "group": "generation", "port": port}
        parallel = {"tensorParallel": tensor, "dataParallel": data, "devices": list(range(tensor * data))}
        engines.append({**engine, **parallel, "elastic": index in elastic})
    member = here | {"pod": "trainer-0", "group": "trainer", "statusPort": status_port, "gpus": 1, "rankOffset": 0}
    vllm = {"maxModelLen": 128, "kvCacheMemory": "64Mi", "engineArgs": {"enforce_eager": True}}
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "training": {"maxCompletionLength": 8},
        "generation": {"topology": "Server"} | vllm | generation,
    }
    return Contract.model_validate(
        contract_json(
            config,
            device="cpu",
            members=[member],
            engines=engines,
            transfers=[here | {"sender": 0, "port": transfer_port}],
            masterPort=master_port,
            timeoutSeconds=timeout,
            restartEngines=restarts,
            durable=False,
        )
    )


def with_ranks(contract: Contract, ranks: int) -> Contract:
    """Return a contract with the same engines and another number of ranks, which push to them from another port."""
    (port,) = free_ports(1)
    members = tuple(member.model_copy(update={"gpus": ranks}) for member in contract.members)
    transfers = tuple(group.model_copy(update={"port": port}) for group in contract.transfers)
    return contract.model_copy(update={"members": members, "transfers": transfers})


def weights_of(model: Any) -> Export:
    """Return the weights of a transformers model, as they are pushed."""
    return Export(full(model), is_partitioned=False)


def change(model: Any, seed: int | None = None) -> None:
    """Add random noise to all parameters, the same for each seed."""
    random = None if seed is None else torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn(one.shape, generator=random, dtype=one.dtype, device=one.device) * 0.02)


@contextmanager
def own_world(folder: Path) -> Iterator[None]:
    """Make this process the only rank of a group, which meets in a file in `folder`."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def own_generator(
    contract: Contract, weights: Callable[[], Export], folder: Path, *timing: Timing
) -> Iterator[ServerGenerator]:
    """Yield the generator of the only rank, which sends these weights first."""
    with own_world(folder), closing(ServerGenerator(contract, 0, weights, *timing)) as ready:
        yield ready


def largest_difference(model: Any, generator: ServerGenerator, num_generations: int = 4) -> float:
    """Return the largest difference of a token's log-probability between the engines and the model, on new samples."""
    return float(differences(model, prompts(), generator.generate(prompts(), num_generations)).max())


def differences(model: Any, asked: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> Tensor:
    """Return |log-probability of the model - of the engine| of each token of these completions: [tokens]."""
    found = [
        (own_logprobs(model, prompt, completion) - torch.tensor(completion.logprobs)).abs()
        for prompt, group in zip(asked, groups, strict=True)
        for completion in group
    ]
    return torch.cat(found)


def own_logprobs(model: Any, prompt: Prompt, completion: Completion) -> Tensor:
    """Return a transformers model's log-probabilities of a completion's tokens, in float32 in host memory: [tokens]."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=model.device)
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1].float().log_softmax(dim=-1)
    return scores.gather(1, ids[0, len(prompt.token_ids) :].unsqueeze(1)).squeeze(1).cpu()


class Engines:
    """The engine pods of a contract, each a launcher that starts vLLM."""

    def __init__(
        self, folder: Path, contract: Contract, *, each_a_host: bool = False, forks: bool | None = None
    ) -> None:
        """Write the contract.

        Args:
            folder: where pods leave their states and logs.
            contract: the job's contract.
            each_a_host: pods call themselves hosts of their own, so that NCCL lets them share a GPU.
            forks: pods are forked from a process that has loaded vLLM, and fork their servers (None: on CPUs).
        """
        self.folder, self.contract, self._each_a_host = folder, contract, each_a_host
        self._forks = contract.device == Device.CPU if forks is None else forks
        self.launchers: dict[str, Launcher] = {}  # by engine, and those of its other pods by pod
        self._may_end: set[Launcher] = set()  # launchers whose end is no failure
        (folder / "contract.json").write_text(contract.model_dump_json(by_alias=True))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start all engines but elastic ones, and stop them at the end.

        If a launcher ends meanwhile and the test has not called `expect_end` or `kill`, the main thread fails at once
        with the end of the launcher's log, whatever it waits for.
        """
        stopping, main_thread = threading.Event(), threading.get_ident()

        def failure() -> str | None:
            for engine in self.contract.engines:
                launcher = self.launchers.get(engine.name)
                if launcher and launcher.poll() is not None and launcher not in self._may_end:
                    log = self.log(engine).read_text()[-4000:]
                    return f"the launcher of {engine.name} ended with {launcher.returncode}:\n{log}"
            return None

        def watch() -> None:
            while not stopping.wait(POLL):
                if failure() is not None:
                    signal.pthread_kill(main_thread, signal.SIGUSR1)  # interrupts whatever it waits for
                    return

        def fail(_number: int, _frame: FrameType | None) -> None:
            pytest.fail(failure() or "")

        for engine in self.contract.engines:
            if not engine.elastic:
                for pod in reversed(engine.pods):
                    self.start(engine, pod)
        previous = signal.signal(signal.SIGUSR1, fail)
        watcher = threading.Thread(target=watch, name="engines-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stopping.set()
            watcher.join()
            signal.signal(signal.SIGUSR1, previous)
            self.close()

    def start(self, engine: Engine, pod: str = "") -> Launcher:
        """Start the container of an engine's pod, or of another one of its pods, for the first time or again."""
        pod = pod or engine.pod
        state = self.folder / pod
        state.mkdir(exist_ok=True)
        environ = {
            "GRPO_CONTRACT": str(self.folder / "contract.json"),
            "GRPO_STATE_DIR": str(state),
            "GRPO_TERMINATION_LOG": str(self.folder / f"{pod}.termination-log"),
            "POD_NAME": pod,
            "POD_UID": f"uid-of-{pod}",
            "OMP_NUM_THREADS": "1",
        }
        if self._each_a_host:
            environ["NCCL_HOSTID"] = pod
        environ = {**os.environ, "PYTHONPATH": PYTHONPATH, **environ}
        process: Launcher
        with (self.folder / f"{pod}.log").open("ab") as log:
            if self._forks:
                process = SERVERS.start(WITH_VLLM, [str(PROGRAMS / "forking_engine_pod.py")], environ, log.fileno())
            else:
                command = [sys.executable, "-m", "grpo_workload.engine_pod"]
                process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        self.launchers[engine.name if pod == engine.pod else pod] = process
        return process

    def expect_end(self, engine: Engine) -> Launcher:
        """Note that the test ends this engine; return its launcher."""
        launcher = self.launchers[engine.name]
        self._may_end.add(launcher)
        return launcher

    def kill(self, engine: Engine) -> None:
        """Kill an engine as if its node had failed: server, workers and launcher."""
        launcher = self.expect_end(engine)
        launcher.send_signal(signal.SIGSTOP)  # a stopped launcher cannot record the end of its server
        os.killpg(self.server(engine), signal.SIGKILL)
        launcher.kill()
        launcher.wait()

    def replace(self, engine: Engine) -> Launcher:
        """Start a new pod for an engine, with an empty disk."""
        shutil.rmtree(self.folder / engine.pod)
        return self.start(engine)

    def log(self, engine: Engine) -> Path:
        return self.folder / f"{engine.pod}.log"

    def termination_log(self, engine: Engine) -> Path:
        return self.folder / f"{engine.pod}.termination-log"

    def server(self, engine: Engine) -> int:
        """Return the process id of an engine's vLLM server."""
        launcher = self.launchers[engine.name].pid
        children = eventually(
            lambda: Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split(), "the launcher starts vLLM"
        )
        return int(children[0])

    def close(self) -> None:
        """Stop all pods."""
        for launcher in self.launchers.values():
            launcher.send_signal(signal.SIGTERM)
        for launcher in self.launchers.values():
            launcher.wait(30)
