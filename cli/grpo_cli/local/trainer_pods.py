"""A job's trainer pods as processes of this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_cli.local.pod_process import launch, outcome_of
from grpo_cli.local.restarts import LocalRestarts
from grpo_operator.api.names import Role
from grpo_operator.layout.contracts import smaller_micro_batches
from grpo_operator.layout.job import Job
from grpo_spec.contract import Contract
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome


class TrainerPods:
    """The processes. With `restartStrategy: InPlace`, another attempt begins after a rank has failed, as often and as
    late as the operator would let it: pods of engines find its contract in their file, and go on.
    """

    def __init__(
        self,
        job: Job,
        contract: Contract,
        output: Path,
        variables: Mapping[str, Mapping[str, str]],
        say: Callable[[str], object],
        restarts: LocalRestarts,
    ) -> None:
        """Write the contract into `output` and start all pods. `say` gets a line for each restart."""
        self._job, self._contract, self._output = job, contract, output
        self._variables, self._say, self._restarts = variables, say, restarts
        self._due: float | None = None  # when the next attempt begins
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By pod."""
        self._begin()

    def goes_on(self, step: int) -> bool:
        """Begin an attempt whose wait is over. Return False once all pods have ended for good.

        `step`: number of steps that the run has finished.
        """
        if any(process.poll() is None for process in self.processes.values()):
            return True
        if self._due is None:
            return self._settle(step)
        if time.monotonic() >= self._due:
            self._due = None
            self._begin()
        return True

    def outcomes(self) -> dict[str, Outcome]:
        """Return how each pod has ended."""
        return {pod: outcome_of(self._output, pod, process.returncode) for pod, process in self.processes.items()}

    def _settle(self, step: int) -> bool:
        """Decide whether another attempt begins, and when; return whether one does."""
        if self._job.spec.failure_policy.restart_strategy != "InPlace":
            return False
        failed = [(pod, ended) for pod, ended in self.outcomes().items() if ended.exit_code == ExitCode.RANK_FAILED]
        # Ranks whose launcher was killed may still run. One that others only lost is no cause.
        if not failed or any(ended.reason == Reason.LAUNCHER_DIED for _, ended in failed):
            return False
        (pod, ended), halvings = failed[0], self._contract.micro_batch_halvings
        answer = self._restarts.after(pod, Role.TRAINER, ended, step, halvings)
        if answer.decision.action == "Fail":
            self._say(f"no other attempt begins: {answer.decision.why}")
            return False
        halvings += answer.halves
        training = smaller_micro_batches(self._job.spec.trainer_config().training, halvings)
        config = self._contract.config.model_copy(update={"training": training})
        update = {"attempt": self._contract.attempt + 1, "micro_batch_halvings": halvings, "config": config}
        self._contract = self._contract.model_copy(update=update)
        self._due = time.monotonic() + answer.wait
        first = ended.message.partition("\n")[0]
        self._say(f"{pod}: {ended.reason}: {first}; attempt {self._contract.attempt} begins in {answer.wait} s")
        return True

    def _begin(self) -> None:
        path = self._output / "contract.json"
        fresh = path.with_suffix(".tmp")
        fresh.write_text(self._contract.model_dump_json(by_alias=True, exclude_none=True, indent=1))
        fresh.replace(path)  # pods of engines look at it all the time
        for member in self._contract.members:
            variables = self._variables[member.pod]
            self.processes[member.pod] = launch("grpo_workload.trainer_pod", member.pod, path, self._output, variables)
