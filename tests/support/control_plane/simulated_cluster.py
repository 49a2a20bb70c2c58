"""Kubernetes in memory: the controllers that a job meets, one step at a time, and what can happen to pods and nodes.

The StatefulSet controller, scheduler and kubelets do their work at once when they are let; garbage collection may come
much later. A container that ends is restarted and holds, as launchers do, until its pod is told of a later attempt.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from grpo_operator.api import names
from grpo_operator.decide.objects import controller_of
from grpo_spec.reports import ExitCode, Outcome
from support.control_plane.memory_store import Object, Selection, Store

NODES = ("node-1", "node-2", "node-3")
START = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACE = "ns"

_READY = [{"type": "Ready", "status": "True"}]
_NO_ROOM = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]


def attempt_in(pod: Object) -> int:
    """Return the attempt that the launcher in a pod knows of."""
    return int(pod["status"].get("attempt", pod["metadata"]["labels"][names.LABEL_ATTEMPT]))


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    return {"type": "Ready", "status": "True"} in pod["status"].get("conditions", ())


def is_of_environments(pod: Object) -> bool:
    """Whether it is an environment pod."""
    return bool(pod["metadata"]["labels"].get(names.LABEL_ROLE) == names.Role.ENVIRONMENT)


def _container(restarts: int, **more: Any) -> Object:
    return {"name": names.CONTAINER, "restartCount": restarts, "state": {"running": {}}, **more}


class SimulatedCluster:
    """`clock` gives the seconds since START. `room`: most pods that have a node at the same time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.store = Store(lambda: self.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
        self.lost: dict[str, str] = {}
        self.room = 99
        for node in NODES:
            self._put_node(node)

    def now(self) -> datetime:
        """Return the time of now."""
        return START + timedelta(seconds=self._clock())

    # What there is

    def job(self, name: str) -> Object | None:
        """Return a job."""
        return self.store.get(names.KIND, NAMESPACE, name)

    def pods(self, **labels: str) -> list[Object]:
        """Return the pods of attempts with these labels, named as in `names`: job, uid, attempt."""
        return [pod for pod in self._pods(**labels) if not is_of_environments(pod)]

    def environment_pods(self, **labels: str) -> list[Object]:
        """Return the environment pods with these labels."""
        return [pod for pod in self._pods(**labels) if is_of_environments(pod)]

    def _pods(self, **labels: str) -> list[Object]:
        known = {"job": names.LABEL_JOB, "uid": names.LABEL_JOB_UID, "attempt": names.LABEL_ATTEMPT}
        wanted = tuple((known[name], value) for name, value in labels.items())
        return [pod for pod in self.store.select(Selection("Pod", NAMESPACE, wanted)) if controller_of(pod)]

    # Controllers

    def step(self) -> None:
        """Let all controllers but the garbage collector do their work once."""
        self.run_statefulsets()
        self.run_kubelets()

    def run_statefulsets(self) -> None:
        """Create, delete and replace pods as StatefulSets want."""
        for group in self.store.select(Selection("StatefulSet")):
            there = {pod["metadata"]["name"]: pod for pod in self._owned(group)}
            wanted = [f"{group['metadata']['name']}-{n}" for n in range(group["spec"]["replicas"])]
            for name, pod in there.items():
                if pod["status"].get("phase") == "Failed":
                    self.store.remove("Pod", NAMESPACE, name)
                elif name not in wanted:
                    self.delete_pod(pod)
            for name in wanted:
                if self.store.get("Pod", NAMESPACE, name) is None:
                    self._create_pod(group, name)
            ready = sum(is_ready(pod) for pod in self._owned(group))
            self.store.edit(group, status={"readyReplicas": ready})

    def run_kubelets(self) -> None:
        """Place pods on nodes, start them, and end those that are deleted; nothing happens on lost nodes."""
        free, pods = [node for node in NODES if node not in self.lost], self._pods()
        room = self.room - sum("nodeName" in pod["spec"] for pod in self.pods())
        for number, pod in enumerate(pods):
            node = pod["spec"].get("nodeName")
            others = is_of_environments(pod)
            if node is None and (not free or (room <= 0 and not others)):
                self.store.edit(pod, status={"conditions": _NO_ROOM})
            elif node is None:
                room -= not others
                placed = {**pod["spec"], "nodeName": free[number % len(free)]}
                self.store.edit(pod, spec=placed, status={"podIP": f"10.0.0.{number}", "conditions": []})
            elif node in self.lost:
                continue
            elif "deletionTimestamp" in pod["metadata"]:
                self.store.remove("Pod", NAMESPACE, pod["metadata"]["name"])
            elif others:
                running = _container(pod["status"].get("restarts", 0))
                ready = () if pod["status"].get("sick") else _READY
                self.store.edit(pod, status={"containerStatuses": [running], "conditions": ready})
            elif not pod["status"].get("containerStatuses"):
                began = {"containerStatuses": [_container(0)], "attempt": self._contract(pod), "over": False}
                self.store.edit(pod, status=began | {"conditions": _READY})
            elif pod["status"].get("killed"):
                self.end_container(pod, ExitCode.RANK_FAILED, "LauncherDied")
            elif self._is_told(pod):
                self.store.edit(pod, status={"attempt": self._contract(pod), "over": False, "conditions": _READY})

    def _contract(self, pod: Object) -> int:
        """Return the attempt whose contract is in the ConfigMap of the pod."""
        labels = pod["metadata"]["labels"]
        name = names.contract_name(labels[names.LABEL_JOB], int(labels[names.LABEL_ATTEMPT]))
        contract = self.store.get("ConfigMap", NAMESPACE, name)
        return int((contract or pod)["metadata"]["labels"].get(names.LABEL_ATTEMPT, 0))

    def _is_told(self, pod: Object) -> bool:
        """Whether the kubelet looks at the contract again, which is one of a later attempt."""
        said = pod["metadata"].get("annotations", {}).get(names.ANNOTATION_ATTEMPT)
        return said is not None and self._contract(pod) > attempt_in(pod)

    def collect_garbage(self) -> None:
        """Delete what has a controller that no longer exists."""
        uids = {raw["metadata"]["uid"] for raw in self.store.objects.values()}
        for raw in [*self.store.objects.values()]:
            owner = controller_of(raw)
            if owner and owner["uid"] not in uids:
                if raw["kind"] == "Pod":
                    self.delete_pod(raw)
                else:
                    self.store.remove(raw["kind"], NAMESPACE, raw["metadata"]["name"])

    # What happens to pods and nodes

    def delete_pod(self, pod: Object, **condition: str) -> None:
        """Delete a pod as its user does, or as an eviction with this DisruptionTarget condition.

        One without a node is gone at once.
        """
        status = {"conditions": [*pod["status"].get("conditions", ()), condition]} if condition else {}
        if "nodeName" not in pod["spec"]:
            self.store.remove("Pod", NAMESPACE, pod["metadata"]["name"])
        elif "deletionTimestamp" not in pod["metadata"]:
            self.store.edit(pod, metadata={"deletionTimestamp": self.store.time()}, status=status)

    def end_container(self, pod: Object, exit_code: int, reason: str) -> None:
        """End the launcher in a pod, with a result unless it was killed; its container is restarted and holds.

        One that was killed finds that out when it is restarted, says so, and is restarted once more.
        """
        said, attempt, killed = "", attempt_in(pod), exit_code not in {*ExitCode}
        if not killed:
            outcome = Outcome(attempt=attempt, exit_code=ExitCode(exit_code), reason=reason, message=f"said {reason}")
            said = outcome.to_message()
        ended = {"exitCode": exit_code, "message": said, "finishedAt": self.store.time()}
        held = _container(1 + bool(pod["status"].get("killed")), lastState={"terminated": ended})
        not_ready = [{"type": "Ready", "status": "False"}]
        ends = {"containerStatuses": [held], "conditions": not_ready, "over": True, "killed": killed}
        self.store.edit(pod, status=ends)

    def disturb_environments(self, pod: Object, *, sick: bool) -> None:
        """End the container of an environment pod. Its kubelet restarts it, and it is ready again unless it is sick."""
        status = {"restarts": pod["status"].get("restarts", 0) + 1, "sick": sick, "conditions": []}
        self.store.edit(pod, status=status)

    def evict_by_kubelet(self, pod: Object, *, own_fault: bool) -> None:
        """Fail a pod because its node runs short of something, or because of a limit of its own; its StatefulSet
        replaces it at once.
        """
        target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        conditions = [*pod["status"].get("conditions", ()), *(() if own_fault else (target,))]
        failed = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": conditions}
        self.store.edit(pod, status=failed)

    def refuse(self, pod: Object) -> None:
        """Fail a pod whose containers have not begun, because its kubelet cannot admit it."""
        if "nodeName" in pod["spec"] and not pod["status"].get("containerStatuses"):
            self.store.edit(pod, status={"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"})

    def lose_node(self, node: str) -> None:
        """Cut a node off: its pods are no longer ready, and no kubelet ends them."""
        self.lost[node] = self.store.time()
        self._put_node(node)
        for pod in self._pods():
            if pod["spec"].get("nodeName") == node:
                self.store.edit(pod, status={"conditions": [{"type": "Ready", "status": "False"}]})

    def return_node(self, node: str) -> None:
        """Bring a lost node back; pods that were not deleted meanwhile are ready again."""
        del self.lost[node]
        self._put_node(node)
        for pod in self.pods():
            if pod["spec"].get("nodeName") == node and pod["status"].get("over") is False:
                self.store.edit(pod, status={"conditions": _READY})

    def _owned(self, group: Object) -> Iterator[Object]:
        for pod in self._pods():
            if pod["metadata"]["ownerReferences"][0]["uid"] == group["metadata"]["uid"]:
                yield pod

    def _create_pod(self, group: Object, name: str) -> None:
        metadata: dict[str, Any] = {"name": name, "namespace": NAMESPACE}
        metadata["labels"] = group["spec"]["template"]["metadata"]["labels"]
        owner = {"kind": "StatefulSet", "name": group["metadata"]["name"], "uid": group["metadata"]["uid"]}
        metadata["ownerReferences"] = [owner | {"controller": True}]
        self.store.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": {}})

    def _put_node(self, name: str) -> None:
        status = "Unknown" if name in self.lost else "True"
        ready = {"type": "Ready", "status": status, "lastTransitionTime": self.store.time()}
        self.store.put({"kind": "Node", "metadata": {"name": name}, "status": {"conditions": [ready]}})
