"""A job's pods as processes of this machine, with the topology and contract of a cluster; only addresses differ."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.errors import CliError, Exit
from grpo_cli.local.engine_pods import EnginePods
from grpo_cli.local.environment_pods import EnvironmentPods
from grpo_cli.local.pod_process import outcome_of, state_folder
from grpo_cli.local.restarts import LocalRestarts
from grpo_cli.local.trainer_pods import TrainerPods
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.contract import Contract, Engine, Member
from grpo_spec.reports import Outcome, Progress
from grpo_workload.reporting.progress_files import read_progress

POLL_SECONDS = 0.2
"""Seconds between two looks at the pods."""

PORTS = range(20_000, 32_768)
"""Ports below those that Linux assigns to connections (net.ipv4.ip_local_port_range)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """Result of a local run."""

    outcomes: dict[str, Outcome]  # by pod
    run_folder: Path

    @property
    def exit_code(self) -> int:
        """0 if every pod succeeded, else the exit code of the first that failed."""
        return next((int(o.exit_code) for o in self.outcomes.values() if o.exit_code), 0)


def local_contract(job: Job, topology: Topology) -> Contract:
    """Return the job's contract with all pods on this machine, each with its own ports and devices.

    Pods get the machine's devices in order, or those of CUDA_VISIBLE_DEVICES if it lists numbers.
    """
    contract = make_contract(job, topology, 0)
    if spread := next((engine.group for engine in contract.engines if engine.followers), None):
        said = f"podsPerEngine of group {spread} needs a cluster; with 1, and the GPUs in one pod, it runs here"
        raise CliError(f"spec.generation.server.groups: {said}", Exit.INVALID)
    first = dict(
        zip(
            topology.pods,
            itertools.accumulate((g.gpus for g in topology.groups for _ in g.pods), initial=0),
            strict=False,
        )
    )
    served = sum(len(group.addresses) for group in contract.environment_pods)
    ports = iter(free_ports(1 + len(contract.members) + len(contract.engines) + len(contract.transfers) + served))
    here = "127.0.0.1"
    visible = [
        int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.strip().isdigit()
    ]

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
                engine.model_copy(update={"host": here, "port": next(ports), "devices": shifted(engine)})
                for engine in contract.engines
                if engine.pod in first  # no engine joins or leaves here
            ),
            "transfers": tuple(
                group.model_copy(update={"host": here, "port": next(ports)}) for group in contract.transfers
            ),
            "environment_pods": tuple(
                group.model_copy(update={"addresses": tuple(f"{here}:{next(ports)}" for _ in group.addresses)})
                for group in contract.environment_pods
            ),
            "durable": True,
        }
    )


def run(
    job: Job,
    topology: Topology,
    output: Path,
    show: Callable[[Progress], None],
    say: Callable[[str], object],
    variables: Mapping[str, Mapping[str, str]],
) -> LocalResult:
    """Run all pods in folders of `output` until the trainer pods have ended.

    `variables`: by pod, what its processes get besides the variables of this process. `show` is called several times
    a second with the progress of rank 0, once it has any, `say` with a line for people. A trainer pod that fails ends
    the others: their launchers notice that a peer is gone, as in a cluster. Another attempt, or another engine pod,
    begins where `failurePolicy` says so, else the run ends; an environment pod always begins again. Both are ended when
    the trainer pods have ended.
    """
    contract = local_contract(job, topology)
    output.mkdir(parents=True, exist_ok=True)
    restarts = LocalRestarts(job)
    trainers = TrainerPods(job, contract, output, variables, say, restarts)
    engines = EnginePods(contract, output, variables, say, restarts)
    environments = EnvironmentPods(job, topology, contract, output, variables)

    def report() -> int:
        """Show the progress; return the number of steps."""
        if progress := read_progress(state_folder(output, contract.master.pod)):
            show(progress)
        step = progress.step if progress else 0
        restarts.forget_after_progress(step)
        return step

    # Exits through `finally`: no pod outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while engines.goes_on(step := report()) and trainers.goes_on(step):
            environments.restart()
            time.sleep(POLL_SECONDS)
    finally:
        started = [*trainers.processes.values(), *engines.processes.values(), *environments.processes.values()]
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            process.wait()
    report()
    failed = {pod: outcome_of(output, pod, engines.processes[pod].returncode) for pod in sorted(engines.failed)}
    return LocalResult(outcomes=failed | trainers.outcomes(), run_folder=output / "data" / job.ref.run)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on; the kernel assigns none of them to a connection before a pod listens."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(ports) == count:
                break
            with suppress(OSError):  # the port is in use
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
        return ports
