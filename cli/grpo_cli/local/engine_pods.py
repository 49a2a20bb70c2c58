"""A job's engine pods as processes of this machine."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_cli.local.pod_process import launch, outcome_of, state_folder
from grpo_cli.local.restarts import LocalRestarts
from grpo_operator.api.names import Role
from grpo_spec.contract import Contract


class EnginePods:
    """The processes. For one that ends another begins where `failurePolicy` lets an engine restart alone, as often and
    as late as the operator would replace its pod.
    """

    def __init__(
        self,
        contract: Contract,
        output: Path,
        variables: Mapping[str, Mapping[str, str]],
        say: Callable[[str], object],
        restarts: LocalRestarts,
    ) -> None:
        """Start all that are no trainer pods; their contract is in `output`. `say` gets a line for each restart."""
        self._output, self._variables, self._say, self._restarts = output, variables, say, restarts
        self._due: dict[str, float] = {}  # by pod that has ended: when another begins
        trainers = {member.pod for member in contract.members}
        pods = sorted({engine.pod for engine in contract.engines} - trainers)
        self.processes = {pod: self._launch(pod) for pod in pods}
        """By pod."""
        self.failed: set[str] = set()
        """Pods for which no other begins."""

    def goes_on(self, step: int) -> bool:
        """Start pods whose wait is over. Return False once a pod has ended for good, which ends the run.

        `step`: number of steps that the run has finished.
        """
        for pod, process in self.processes.items():
            if process.poll() is None:
                continue
            if pod not in self._due:
                self._settle(pod, process.returncode, step)
            elif time.monotonic() >= self._due[pod]:
                del self._due[pod]
                self.processes[pod] = self._launch(pod)
        return not self.failed

    def _settle(self, pod: str, returncode: int, step: int) -> None:
        """Decide, as the operator does, whether another begins, and when."""
        ended = outcome_of(self._output, pod, returncode)
        answer = self._restarts.after(pod, Role.GENERATION, ended, step)
        if answer.decision.action != "RestartGeneration":
            self.failed.add(pod)
            self._say(f"no other {pod} begins: {answer.decision.why}")
            return
        self._due[pod] = time.monotonic() + answer.wait
        first = ended.message.partition("\n")[0]
        self._say(f"{pod}: {ended.reason}: {first}; another begins in {answer.wait} s")

    def _launch(self, pod: str) -> subprocess.Popen[bytes]:
        state = state_folder(self._output, pod)
        for own in state.glob("*"):  # A new pod begins with an empty folder; logs stay for people.
            if own.suffix != ".log":
                shutil.rmtree(own) if own.is_dir() else own.unlink()
        contract = self._output / "contract.json"
        return launch("grpo_workload.engine_pod", pod, contract, self._output, self._variables[pod])
