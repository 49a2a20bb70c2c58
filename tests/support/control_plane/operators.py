"""The operator as a process, with the service account and the roles of the chart, and GRPOJobs for it."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from grpo_cli.local.processes import free_ports
from grpo_devcluster import binaries
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from grpo_operator.api import names
from support.control_plane.chart import render
from support.control_plane.jobs import spec as small_spec

NAMESPACE = "grpo-system"
USER = f"system:serviceaccount:{NAMESPACE}:grpo-operator"


@dataclass(frozen=True)
class Release:
    """An installation by the chart without its pod: a process takes its place, with the same rights and arguments."""

    name: str
    namespace: str
    kubeconfig: Path
    arguments: tuple[str, ...]

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"


def install_chart(
    plane: ControlPlane, kubectl: Any, *values: str, name: str = "grpo-operator", namespace: str = NAMESPACE
) -> Release:
    """Apply the objects of `helm install` except the Deployment; `values` are given to --set."""
    binaries.build("all")
    chosen = [f"--set={value}" for value in (f"fullnameOverride={name}", *values)]
    objects = render(*chosen, release=name, namespace=namespace)
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    rest = [o for o in objects.values() if o["kind"] not in ("Deployment", "NetworkPolicy")]
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(made))
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(rest))
    wait_for_crd(kubectl)
    return Release(name, namespace, kubeconfig_of(plane, kubectl, namespace, name), tuple(container["args"]))


def kubeconfig_of(plane: ControlPlane, kubectl: Any, namespace: str, account: str, name: str = "") -> Path:
    """Write a kubeconfig for a service account. One for each `name`, each with its own token."""
    token = kubectl("create", "token", account, "-n", namespace, "--duration=2h").strip()
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = plane.state / f"{namespace}.{account}{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def wait_for_crd(kubectl: Any, name: str = "grpojobs.training.grpo.dev") -> None:
    """Wait until the API server serves a CRD's objects; `kubectl wait` gives up on one that has no conditions yet."""

    def established() -> bool:
        crd = json.loads(kubectl("get", "crd", name, "-o", "json"))
        conditions = crd.get("status", {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    wait_until(established, f"the CRD {name} is established", 60, interval=0.2)


class Operator:
    """Starts and kills the operator's process."""

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        arguments: Sequence[str] = (),
        program: Sequence[str] = ("-m", "grpo_operator"),
        *,
        metrics_port: int | None = None,
        pod: str = "operator-0",
    ) -> None:
        """Operators of one release that run at one time need different names of their `pod`."""
        self.kubeconfig, self.log, self.metrics_port = kubeconfig, log, metrics_port
        self._arguments = [argument.replace("$(POD_NAME)", pod) for argument in arguments]
        self._program = program
        self.port = free_ports(1)[0]  # port of /healthz and /readyz
        self.asks_launchers = False  # fake pods have none
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the operator, unless it runs. It may have ended by itself: without its Lease, as after a long stall."""
        if self._process is not None and not self.has_ended:
            return
        command = [sys.executable, *self._program, "run", *self._arguments, f"--liveness-port={self.port}"]
        if not self.asks_launchers:
            command.append("--no-progress")
        if self.metrics_port is not None:
            command += ["--metrics-port", str(self.metrics_port)]
        with self.log.open("ab") as log:
            environment = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def passes(self) -> float:
        """Return the number of passes over jobs so far, from the operator's metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        name = "grpo_operator_reconcile_duration_seconds_count"
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    @property
    def pid(self) -> int | None:
        """The process id; None if the operator was not started."""
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the operator was started and has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the running operator."""
        assert self._process is not None
        self._process.send_signal(number)

    def get(self, path: str) -> tuple[int, str]:
        """Return the status code and the text of /healthz or /readyz; 0 if nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def kill(self) -> None:
        """End the operator by SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def down(self) -> Iterator[None]:
        """Run the block without an operator."""
        self.kill()
        yield
        self.start()


class Jobs:
    """GRPOJobs and other objects of one namespace."""

    def __init__(self, kubectl: Any, namespace: str) -> None:
        self.kubectl, self.namespace = kubectl, namespace

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        return str(self.kubectl("-n", self.namespace, *args, stdin=stdin))

    def get(self, what: str, name: str) -> dict[str, Any]:
        """Return an object."""
        return json.loads(self("get", what, name, "-o", "json"))

    def nodes(self, name: str) -> list[str]:
        """Return the nodes of a job's pods, one for each that has a node."""
        return sorted(pod["spec"]["nodeName"] for pod in self.pods(name).values() if "nodeName" in pod["spec"])

    def list(self, what: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind."""
        return json.loads(self("get", what, "-l", selector, "-o", "json"))["items"]

    def apply(self, manifest: dict[str, Any]) -> None:
        """Apply a manifest with kubectl."""
        self("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def run(self, name: str, **spec: Any) -> None:
        """Apply a job with these fields and wait until it runs."""
        self.apply(make_job(name, **spec))
        self.wait_for(name, "Running", "True")

    def edit(self, name: str, **spec: Any) -> None:
        """Merge fields into the spec of a job."""
        self("patch", "grpo", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def status(self, name: str) -> dict[str, Any]:
        """Return the status of a job."""
        return dict(self.get("grpojob", name).get("status", {}))

    def pods(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the pods of a job, by name."""
        return {pod["metadata"]["name"]: pod for pod in self.list("pod", f"training.grpo.dev/job={name}")}

    def uids(self, name: str) -> dict[str, str]:
        """Return the UIDs of a job's pods, by name."""
        return {pod: found["metadata"]["uid"] for pod, found in self.pods(name).items()}

    def replicas(self, name: str) -> dict[str, int]:
        """Return the replicas of a job's StatefulSets."""
        sets = self.list("statefulset", f"training.grpo.dev/job={name}")
        return {one["metadata"]["name"]: one["spec"]["replicas"] for one in sets}

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return a condition of a job; empty if it is not set."""
        conditions = self.get("grpojob", name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_for(
        self, name: str, kind: str, status: str, reason: str | None = None, timeout: float = 60
    ) -> dict[str, Any]:
        """Wait for a condition and return it."""

        def holds() -> bool:
            found = self.condition(name, kind)
            return found.get("status") == status and reason in (None, found.get("reason"))

        try:
            wait_until(holds, f"{kind}={status} ({reason}) of {name}", timeout, interval=0.2)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; status: {json.dumps(self.status(name), indent=1)}") from None
        return self.condition(name, kind)

    def wait_for_attempt(self, name: str, attempt: int, timeout: float = 80) -> dict[str, Any]:
        """Wait until this attempt of a job runs, and return the status."""
        begun = f"attempt {attempt} of {name}"
        wait_until(lambda: self.status(name).get("attempt") == attempt, begun, timeout, interval=0.2)
        self.wait_for(name, "Running", "True")
        return self.status(name)

    def report(self, pod: str, **status: Any) -> None:
        """Write fields of a pod's status, in place of the kubelet."""
        patch = json.dumps({"status": status})
        self("patch", "pod", pod, "--subresource=status", "--type=strategic", "-p", patch)

    def finish_pod(self, pod: str, exit_code: int, message: dict[str, Any]) -> None:
        """Report that a pod's container ended."""
        self.report(pod, **ended_container(exit_code, message)["status"])

    def fail(self, pod: str, message: str = "rank 2: RuntimeError: no luck", reason: str = "RankFailed") -> None:
        """Report that a rank of a pod failed."""
        self.finish_pod(pod, 70, outcome(70, reason, message))

    def succeed(self, *pods: str, attempt: int = 0) -> None:
        """Report that the containers of pods have done their work."""
        for pod in pods:
            self.finish_pod(pod, 0, outcome(0, attempt=attempt))

    def runs_again(self, *pods: str, is_ready: bool = True) -> None:
        """Report, in place of the kubelet, that the containers of pods are ready, or not, whatever they did before."""
        for pod in pods:
            self.report(pod, conditions=conditions(is_ready))


def conditions(is_ready: bool) -> list[dict[str, str]]:
    """Return the conditions of a pod whose containers are ready, or are not."""
    return [{"type": kind, "status": str(is_ready)} for kind in ("Ready", "ContainersReady")]


def ended_container(exit_code: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return the change of a pod's status by which a kubelet reports that its container ended and runs again."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {"exitCode": exit_code, "message": json.dumps(message), "finishedAt": now, "reason": "Error"}
    status = {"name": "grpo", "ready": False, "restartCount": 1, "image": "i", "imageID": "i", "started": True}
    status |= {"state": {"running": {"startedAt": now}}, "lastState": {"terminated": ended}}
    return {"status": {"containerStatuses": [status], "conditions": conditions(False)}}


def outcome(exit_code: int, reason: str = "Done", message: str = "", **more: Any) -> dict[str, Any]:
    """Return a launcher's result."""
    return {"attempt": 0, "podUid": "", "exitCode": exit_code, "reason": reason, "message": message, **more}


def report_balance(jobs: Jobs, name: str, *, engines: int) -> None:
    """Write into a job's status, in place of its ranks, that so many engines would balance them."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    progress = {"step": 9, "totalSteps": 99, "metrics": {"engines/balanced": engines}, "time": now}
    patch = json.dumps({"status": {"progress": progress}})
    jobs("patch", "grpo", name, "--subresource=status", "--type=merge", "-p", patch)


def bind_claim(jobs: Jobs, name: str) -> None:
    """Create a claim that is bound to a volume: the scheduler places no pod without one."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"}}
    volume |= {"claimRef": {"namespace": jobs.namespace, "name": name}, "persistentVolumeReclaimPolicy": "Retain"}
    jobs.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": jobs.namespace}, "spec": volume})
    claim = common | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": jobs.namespace}
    jobs.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim})


def finish_download(jobs: Jobs, job: str, phase: str = "Succeeded") -> None:
    """Wait for the pod of a job that downloads, and let it end as if it had worked, or Failed."""
    selector = f"training.grpo.dev/job={job},training.grpo.dev/role=download"

    def downloads() -> bool:
        return any(pod["spec"].get("nodeName") for pod in jobs.list("pod", selector))

    wait_until(downloads, "a pod downloads", 30, interval=0.2)
    (pod,) = jobs.list("pod", selector)
    jobs.report(pod["metadata"]["name"], phase=phase, conditions=conditions(False)[:1])


def make_job(name: str, *, claim: str | None = None, **spec: Any) -> dict[str, Any]:
    """Return the manifest of a small GRPOJob of 2 + 1 ranks."""
    storage = {"storage": {"claimName": claim}} if claim else {}
    spec = small_spec(**storage | spec)
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
