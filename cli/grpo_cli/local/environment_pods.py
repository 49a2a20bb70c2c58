"""A job's environment pods as processes of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from grpo_cli.local.pod_process import launch, state_folder
from grpo_operator.layout.contracts import make_environment_contract
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.contract import Contract


class EnvironmentPods:
    """The processes, each of which begins again when it has ended, as a kubelet lets it."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        contract: Contract,
        output: Path,
        variables: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Start one at each address that the ranks' contract has."""
        self._output, self._variables = output, variables
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By pod."""
        for group, served in zip(topology.environment_groups, contract.environment_pods, strict=True):
            own = make_environment_contract(job, group)
            for pod, address in zip(group.pods, served.addresses, strict=True):
                text = own.model_copy(
                    update={"port": int(address.rpartition(":")[2]), "is_local": True}
                ).model_dump_json(by_alias=True, exclude_none=True, indent=1)
                self._path(pod).parent.mkdir(parents=True, exist_ok=True)
                self._path(pod).write_text(text)
                self._start(pod)

    def restart(self) -> None:
        """Start those that have ended again."""
        for pod, process in self.processes.items():
            if process.poll() is not None:
                self._start(pod)

    def _start(self, pod: str) -> None:
        module = "grpo_workload.environment_pod"
        self.processes[pod] = launch(module, pod, self._path(pod), self._output, self._variables[pod])

    def _path(self, pod: str) -> Path:
        return state_folder(self._output, pod) / "contract.json"
