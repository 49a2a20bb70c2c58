"""`grpo run`: a job's pods as processes of this machine. The topology and the contract are the cluster's; only addresses differ."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_operator.topology import Job, Topology, make_contract
from grpo_workload import contract as c
from grpo_workload.contract import Contract, Engine, Member, Outcome

PORTS = range(20_000, 32_768)
"""Below those that Linux gives to connections (net.ipv4.ip_local_port_range)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """How a local run ended."""

    outcomes: dict[str, Outcome]  # by pod
    run_folder: Path

    @property
    def exit_code(self) -> int:
        """0 when every pod is done, else the exit code of the first that is not."""
        return next((int(o.exit_code) for o in self.outcomes.values() if o.exit_code), 0)


def local_contract(job: Job, topology: Topology) -> Contract:
    """The job's contract with every pod on this machine, each on ports and devices of its own.

    Pods take the machine's devices in their order, or those of CUDA_VISIBLE_DEVICES where it lists numbers.
    """
    contract = make_contract(job, topology, 0)
    first = dict(zip(topology.pods, itertools.accumulate((g.spec.gpus for g in topology.groups for _ in g.pods), initial=0), strict=False))
    ports = iter(free_ports(1 + len(contract.members) + len(contract.engines) + len(contract.transfers)))
    here = "127.0.0.1"
    visible = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.strip().isdigit()]

    def shifted(place: Member | Engine) -> tuple[int, ...]:
        wanted = [first[place.pod] + device for device in place.devices]
        return tuple(visible[device] if device < len(visible) else device for device in wanted)

    return contract.model_copy(
        update={
            "master_port": next(ports),
            "members": tuple(
                member.model_copy(update={"host": here, "status_port": next(ports), "devices": shifted(member)})
                for member in contract.members
            ),
            "engines": tuple(
                engine.model_copy(update={"host": here, "port": next(ports), "devices": shifted(engine)}) for engine in contract.engines
            ),
            "transfers": tuple(group.model_copy(update={"host": here, "port": next(ports)}) for group in contract.transfers),
            "durable": True,
        }
    )


def run(job: Job, topology: Topology, output: Path, tell: Callable[[Path], None]) -> LocalResult:
    """Run all pods below `output` until the trainer's have ended; `tell` is called every second with rank 0's state folder.

    A trainer pod that fails ends the others: their launchers notice that a peer is gone, as in a cluster. An engine that fails ends the
    run, and engines are ended when the trainer is.
    """
    contract = local_contract(job, topology)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "contract.json"
    path.write_text(contract.model_dump_json(by_alias=True, exclude_none=True, indent=1))
    trainers = {member.pod: _launch("grpo_workload.launch", member.pod, path, output) for member in contract.members}
    engine_pods = {engine.pod for engine in contract.engines} - trainers.keys()
    engines = {pod: _launch("grpo_workload.engine_process", pod, path, output) for pod in sorted(engine_pods)}
    processes = trainers | engines
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through `finally`: no pod outlives this process
    try:
        while any(one.poll() is None for one in trainers.values()) and all(one.poll() is None for one in engines.values()):
            tell(_state(output, contract.master.pod))
            time.sleep(1)
        ended_by_itself = {pod for pod, one in processes.items() if one.poll() is not None}
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        for process in processes.values():
            process.wait()
    tell(_state(output, contract.master.pod))
    counted = sorted(ended_by_itself | trainers.keys(), key=lambda pod: (pod in trainers, pod))
    outcomes = {pod: _outcome(output, pod, processes[pod].returncode) for pod in counted}
    return LocalResult(outcomes=outcomes, run_folder=output / "data" / job.ref.run)


def _state(output: Path, pod: str) -> Path:
    return output / "pods" / pod


def _launch(module: str, pod: str, contract: Path, output: Path) -> subprocess.Popen[bytes]:
    state = _state(output, pod)
    state.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        c.ENV_POD_NAME: pod,
        c.ENV_POD_UID: pod,
        c.ENV_CONTRACT: str(contract),
        c.ENV_STATE_DIR: str(state),
        c.ENV_DATA_DIR: str(output / "data"),
        c.ENV_TERMINATION_LOG: str(state / "termination-log"),
    }
    with (state / "launcher.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=log, stderr=log)


def _outcome(output: Path, pod: str, returncode: int) -> Outcome:
    message = _state(output, pod) / "termination-log"
    if message.exists():
        return Outcome.model_validate_json(message.read_text())
    text = f"the launcher of {pod} ended with {returncode} and left no result; see {_state(output, pod) / 'launcher.log'}"
    return Outcome(epoch=0, exit_code=c.ExitCode.RANK_FAILED, reason="LauncherDied", message=text)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on, and that the kernel gives to no connection until a pod listens, seconds later."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(ports) == count:
                break
            with suppress(OSError):  # somebody does
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
        return ports
