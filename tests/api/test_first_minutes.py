"""The first job of an installation, in whatever order the CRD, the operator and its rights come: it says what it waits
for, the log says it once and without a traceback, and nothing is made twice.
"""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from grpo_cli.main import main as grpo
from grpo_devcluster import binaries, kube
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import NAMESPACE, Jobs, Operator, kubeconfig_of, make_job
from support.paths import ROOT

LIST = (
    "may not list GRPOJob, Pod, StatefulSet, Service, NetworkPolicy, ConfigMap, Job, GRPOClusterDefaults, GRPODefaults;"
)
NAME = "grpojobs.training.grpo.dev"

# The API server keeps which kinds it knows, for up to half a minute, from the first object on that names its owner.
STALE = ("deployment", "someone", "--image=i", "--namespace=default")


class Installation:
    """Parts of an installation, each by a letter: the CRDs, its rights, the operator, the first job, stale discovery; K
    is the CRD of GRPOJobs alone, as of an older release.
    """

    def __init__(self, plane: ControlPlane, scratch: Path) -> None:
        self._plane, self._scratch = plane, scratch
        helm = [str(binaries.binary("helm")), "template", "grpo-operator", str(ROOT / "charts/grpo-operator")]
        options = ["--skip-tests", "--namespace", NAMESPACE, "--set=fullnameOverride=grpo-operator"]
        rendered = subprocess.run([*helm, *options], capture_output=True, text=True, check=True).stdout
        objects = [one for one in yaml.safe_load_all(rendered) if one]
        self._crd = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
        self._rights = [one for one in objects if "Role" in one["kind"]]
        deployment = next(one for one in objects if one["kind"] == "Deployment")
        self._arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        self.kubectl("create", "namespace", NAMESPACE)
        self._apply([one for one in objects if one["kind"] == "ServiceAccount"])
        self._kubeconfig = kubeconfig_of(plane, self.kubectl, NAMESPACE, "grpo-operator")
        self.jobs = Jobs(self.kubectl, "default")

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return kube.kubectl(self._plane.kubeconfig, *args, stdin=stdin)

    def _apply(self, objects: list[dict[str, Any]]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def begin(self, order: str) -> None:
        """Make the parts in this order, each as soon as the API server lets it."""
        self.log = self._scratch / f"{order}.log"
        self.operator = Operator(self._kubeconfig, self.log, self._arguments)
        parts: dict[str, Callable[[], None]] = {
            "C": lambda: self._apply(self._crd),
            "K": lambda: self._apply([one for one in self._crd if one["metadata"]["name"] == NAME]),
            "R": lambda: self._apply(self._rights),
            "O": self._start,
            "S": self._become_stale,
            "J": self._create_job,
        }
        for letter in order:
            parts[letter]()

    def _start(self) -> None:
        self.operator.start()
        wait_until(lambda: self.operator.get("/readyz")[0] != 0, "the operator answers", 60)

    def _become_stale(self) -> None:
        self.kubectl("create", *STALE)
        self.kubectl("wait", "deployment/someone", "--for=condition=Available", "--timeout=30s")

    def _create_job(self) -> None:
        def is_created() -> bool:
            try:
                self.jobs.apply(make_job("first"))
            except RuntimeError:  # the API server does not serve the CRD yet
                return False
            return True

        wait_until(is_created, "the job is created", 60, interval=0.1)

    def warnings(self) -> list[str]:
        """Return the log's warnings and errors, without their times."""
        lines = re.findall(
            r"^\[[^]]+\] \S+ +\[(?:WARNING|ERROR|CRITICAL) *\] (.*)$", self.log.read_text(), re.MULTILINE
        )
        return [str(line) for line in lines]

    def remove(self) -> None:
        """End the operator, and delete what `begin` made."""
        self.operator.kill()
        self.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all([*self._rights, *self._crd]))
        self.jobs("delete", "statefulset,service,configmap,networkpolicy,event", "-l", "training.grpo.dev/job")
        self.jobs("delete", "event,deployment", "--all")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    scratch = tmp_path_factory.mktemp("first")
    with ControlPlane(scratch / "plane", kwok_nodes=1) as plane:
        yield Installation(plane, scratch)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("RSOCJ", [f"the cluster has no CRD {NAME}: kubectl apply --server-side -f crds/"]),
        ("OCJR", [LIST]),
        ("CJRO", []),
        ("KRJO", ["the cluster has no CRD of GRPOClusterDefaults and GRPODefaults, by which a site sets defaults"]),
    ],
)
def test_the_first_job_begins_once_and_the_log_says_once_what_is_missing(
    installation: Installation, order: str, says: list[str]
) -> None:
    try:
        installation.begin(order)
        jobs = installation.jobs
        jobs.wait_for("first", "Running", "True", timeout=90)
        log, warnings = installation.log.read_text(), installation.warnings()
        assert "Traceback" not in log
        assert log.count("\n") < 25, log
        assert max(Counter(warnings).values(), default=0) <= 1, log
        for text in says:
            assert sum(text in line for line in warnings) == 1, log
        status = jobs.status("first")
        assert (status["attempt"], status.get("restarts", {}).get("total", 0)) == (0, 0)
        kinds = Counter(one["kind"] for one in jobs.list("sts,svc,cm,networkpolicy", "training.grpo.dev/job=first"))
        assert kinds == {"StatefulSet": 2, "Service": 1, "ConfigMap": 1, "NetworkPolicy": 1}
        events = json.loads(jobs("get", "events.events.k8s.io", "-o", "json"))["items"]
        reasons = Counter(event["reason"] for event in events if event["regarding"]["kind"] == "GRPOJob")
        assert set(reasons.values()) == {1}, reasons
        assert "InvalidPodTemplate" not in reasons  # the job is not at fault
        # The half minute may end right before the job.
        blocked = jobs.condition("first", "Blocked")
        assert bool(blocked) is ("ClusterNotReady" in reasons)
        assert blocked.get("reason", "Recovered") == "Recovered"
    finally:
        installation.remove()


def test_without_its_crd_an_operator_ends_with_one_line_and_waits_when_it_is_started_again(
    installation: Installation,
) -> None:
    listed = CliRunner().invoke(grpo, ["list", "--kubeconfig", str(installation._plane.kubeconfig)])
    assert (listed.exit_code, listed.stderr.count("\n")) == (4, 1)
    assert f"has no {NAME}: install the operator" in listed.stderr
    try:
        installation.begin("CROJ")
        installation.jobs.wait_for("first", "Running", "True")
        installation.kubectl("delete", "crd", NAME)
        wait_until(lambda: installation.operator.has_ended, "the operator ends", 90)
        installation.operator.start()
        wait_until(lambda: f"has no CRD {NAME}" in installation.operator.get("/readyz")[1], "it waits", 60)
        log = installation.log.read_text()
        assert "Traceback" not in log
        assert log.count("the operator ends, and waits when it is started again: the API server does not serve") == 1
        assert max(Counter(installation.warnings()).values()) == 1, log
    finally:
        installation.remove()
