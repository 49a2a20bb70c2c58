"""The soak: rounds of random work under faults, after each of which every job must come to rest as expected."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from grpo_cli.local.processes import free_ports
from grpo_devcluster import binaries, kube
from grpo_devcluster.controlplane import ControlPlane
from grpo_operator.decide.second_look import News
from grpo_operator.runtime.rate_limits import RATES
from support.control_plane import audit
from support.control_plane.operators import Operator, Release, install_chart
from support.soak import health
from support.soak.api import NAMESPACE, Api
from support.soak.choice import choose
from support.soak.differences import leftovers, versions
from support.soak.faults import KINDS, Etcd, Faults
from support.soak.foreign import Foreign
from support.soak.health import Sample
from support.soak.work import Work

NODES = 24  # for 12 jobs of at most 15 GPUs
REST_SECONDS = 150
"""Seconds in which all jobs come to rest. A pass that failed is repeated after at most 60 s, and after a restart the
API server refuses children of GRPOJobs for up to 30 s."""


CONTROLLERS_SECONDS = 60
"""Seconds in which Kubernetes' controllers do their part, if broken watches have not set them back."""


SHOWN_SECONDS = RATES[News.DETAILS].seconds + 1
"""Seconds after which a status shows all, also that of which only details changed."""


class SoakError(Exception):
    """The operator broke a promise; the text says which."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The length of the soak, its size and its pace."""

    seconds: float = 3600
    seed: int = 0
    jobs: int = 12
    round_seconds: float = 120
    fault_seconds: float = 15  # between two faults
    quiet_seconds: float = 25  # at the end of a round; the operator is measured
    share_with_lease: float = 1 / 3  # of the time
    kinds: Sequence[str] = KINDS  # of faults
    share_of_others: float = 0.3  # of acts that are followed by one of others


def soak(folder: Path, options: Options) -> dict[str, Any]:
    """Run the soak and return what it did and measured. Raises SoakError.

    `folder` gets the state of the control plane, the log of what was done and the operators' logs.
    """
    binaries.build("controlplane")
    with ControlPlane(folder / "plane", kwok_nodes=NODES) as plane, (folder / "soak.log").open("w", buffering=1) as log:
        release = install_chart(plane, lambda *args, stdin=None: kube.kubectl(plane.kubeconfig, *args, stdin=stdin))
        started = time.monotonic()

        def note(text: str) -> None:
            log.write(f"{time.strftime('%H:%M:%S')} {time.monotonic() - started:7.1f} {text}\n")

        run = _Soak(plane, release, folder, options, note)
        run.run()
        for log_file in folder.glob("operator*.log"):
            if odd := health.odd_errors(log_file):
                raise SoakError("\n".join([f"{log_file} has errors that no fault explains:", *odd[:10]]))
        return run.result()


class _Soak:
    def __init__(
        self, plane: ControlPlane, release: Release, folder: Path, options: Options, note: Callable[[str], None]
    ) -> None:
        self._plane, self._release, self._folder, self._options, self._note = plane, release, folder, options, note
        self._random = Random(options.seed)
        self._api, self._etcd = Api(plane), Etcd(plane)
        # Others draw numbers of their own, so that a seed does the same work without them.
        self._others = Random(options.seed)
        self._foreign = Foreign(self._api, Random(options.seed), note, self._deleted)
        self._work = Work(self._api, self._random, options.jobs, note, self._foreign)
        self._faults = Faults(plane, self._random, note)
        self._samples: list[Sample] = []
        self._lists: Counter[str] = Counter()
        self._rests: list[float] = []

    def run(self) -> None:
        self._api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        share = self._options.share_with_lease
        # As installed, an operator ends when it has lost the Lease, which a silent API server makes it.
        self._work_under_faults("leased", self._release.arguments, self._options.kinds, self._options.seconds * share)
        # Without a Lease a process lives through all faults, so that what it leaks adds up, and two act at once.
        alone = [argument for argument in self._release.arguments if not argument.startswith("--lease")]
        kinds = [kind for kind in self._options.kinds if kind != "kill operator"]
        self._work_under_faults("unleased", alone, kinds, self._options.seconds * (1 - share))

    def _work_under_faults(self, name: str, arguments: Sequence[str], kinds: Sequence[str], seconds: float) -> None:
        if not seconds:
            return
        operators = []
        for number, port in enumerate(free_ports(2)):
            log, pod = self._folder / f"operator-{name}-{number}.log", f"operator-{number}"
            operators.append(Operator(self._release.kubeconfig, log, arguments, metrics_port=port, pod=pod))
        self._operator = operators[0]
        self._faults.meet(*operators, kinds)
        self._operator.start()
        try:
            self._come_to_rest()
            self._rest()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._round()
            if found := health.leaks(self._samples):
                raise SoakError("\n".join(found))
            for job in self._work.expected:
                self._work.do(("delete", job), at_rest=False)
            self._come_to_rest()
            self._lists += health.count_lists(self._operator)
        finally:
            for operator in operators:
                operator.kill()

    def _deleted(self, kind: str, name: str, since: str) -> bool:
        """Whether the operator has deleted an object of this kind and name since a time, by the audit log."""
        for event in audit.requests(self._plane.audit_log, self._release.user):
            where = event.get("objectRef", {})
            is_it = (where.get("resource"), where.get("name")) == (f"{kind.lower()}s", name)
            if event["verb"] == "delete" and is_it and event["stageTimestamp"] >= since.removesuffix("Z"):
                return True
        return False

    def result(self) -> dict[str, Any]:
        return {
            "seed": self._options.seed,
            "minutes": round(self._options.seconds / 60, 1),
            "jobs": self._options.jobs,
            "actions": dict(self._work.counts),
            "acts of others": dict(self._foreign.counts),
            "faults": dict(self._faults.counts),
            "lists": dict(self._lists),
            "seconds to rest": self._rests,
            "samples": health.as_rows(self._samples),
        }

    def _round(self) -> None:
        self._note("ROUND")
        now = time.monotonic()
        end, fault = now + self._options.round_seconds, now + self._options.fault_seconds
        while time.monotonic() < end:
            self._faults.go_on()
            if time.monotonic() > fault:
                self._faults.next()
                fault = time.monotonic() + self._options.fault_seconds
            differences = self._work.look()
            at_rest = frozenset(name for name in self._work.expected if not differences.get(name))
            if (action := choose(self._random, self._work.jobs, at_rest)) is not None:
                self._work.do(action, at_rest=action[1] in at_rest)
            self._foreign.tend()
            if self._others.random() < self._options.share_of_others:
                self._foreign.act(self._work.jobs, self._work.seen)
            time.sleep(self._random.uniform(0, 0.5))
        self._faults.go_on(until_over=True)
        self._foreign.tend(all_of_it=True)
        self._come_to_rest()
        self._rest()

    def _come_to_rest(self) -> None:
        begin = told = time.monotonic()
        replace = begin + CONTROLLERS_SECONDS
        while True:
            self._faults.go_on()
            differences = {name: found for name, found in self._work.look().items() if found}
            left = leftovers(self._work.expected, self._work.seen)
            if not (differences or left) and health.is_idle(self._operator):
                break
            if time.monotonic() > begin + REST_SECONDS:
                found = {job["metadata"]["name"]: job.get("status") for job in self._work.seen["GRPOJob"]}
                statuses = {name: found.get(name) for name in differences}
                said = json.dumps({"jobs": differences, "left": left, "statuses": statuses}, indent=1)
                raise SoakError(f"not at rest after {REST_SECONDS} s: {said}")
            if time.monotonic() > replace:
                self._faults.replace_controllers()
                replace = time.monotonic() + REST_SECONDS
            if time.monotonic() > told + 20:
                told = time.monotonic()
                self._note(f"not at rest: {differences} {left}")
            time.sleep(0.5)
        self._rests.append(round(time.monotonic() - begin, 1))
        self._note(f"at rest after {self._rests[-1]} s")

    def _rest(self) -> None:
        """Measure the operator; nothing may be written meanwhile, as nothing happens."""
        time.sleep(SHOWN_SECONDS)
        self._work.look()
        before = self._versions()
        sample = health.measure(
            self._operator,
            self._options.quiet_seconds,
            ghosts=health.count_jobs(self._operator) - len(self._work.expected),
            objects=len(health.objects_of_no_job(self._etcd.keys(), self._work.expected.keys() | self._foreign.names)),
            watches=health.count_watches(self._plane.audit_log, self._release.user, self._faults.api_since),
        )
        self._note(f"{sample}")
        self._samples.append(sample)
        self._work.look()
        after = self._versions()
        # A fake node that is late changes its pods.
        changed = [name for name in before.keys() & after.keys() if before[name][0] != after[name][0]]
        if changed := [name for name in changed if before[name][1] == after[name][1]]:
            raise SoakError(f"the operator wrote although nothing happened: {changed}")

    def _versions(self) -> dict[str, tuple[str, frozenset[str]]]:
        """For each job without a deadline, its version and those of its objects."""
        return {
            name: versions(name, self._work.seen)
            for name, job in self._work.expected.items()
            if "activeDeadlineSeconds" not in job.spec
        }
