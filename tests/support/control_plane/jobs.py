"""Jobs and observed pods for unit tests of the operator."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import yaml

from grpo_operator.api import names
from grpo_operator.api.spec import parse_spec
from grpo_operator.api.status import MemberOutcome
from grpo_operator.decide.observe import Child, Observed, read_child
from grpo_operator.decide.observed_pod import Ending, ObservedPod, read_pod
from grpo_operator.layout.job import Job
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import Topology, plan_topology

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def spec(**changes: Any) -> dict[str, Any]:
    """Return a small spec of 2 + 1 ranks with these changes."""
    return {
        "model": {"name": "tiny"},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": [{"name": "accuracy", "accuracy": {}}],
        "trainer": {"groups": [{"name": "a", "replicas": 1, "gpus": 2}, {"name": "b", "replicas": 1, "gpus": 1}]},
    } | changes


def refusals(text: str) -> list[tuple[dict[str, Any], str]]:
    """Return changes of a spec, in YAML, each with the fault that the indented lines below it tell."""
    rows = re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, re.MULTILINE)
    return [(yaml.safe_load(change), " ".join(fault.split())) for change, fault in rows]


def job(**changes: Any) -> Job:
    """Return a job with that spec."""
    return Job(namespace="ns", name="job", uid="uid", generation=1, spec=parse_spec(spec(**changes)))


def pod(name: str, *, outcome: MemberOutcome | None = None, attempt: int = 0, **more: Any) -> ObservedPod:
    """Return an observed pod that runs, with `more` of its fields."""
    nothing = dict.fromkeys(("unschedulable", "waiting", "deletion_time", "disruption"))
    place = {"uid": f"{name}-uid", "group": "", "node": "node", "ip": "10.0.0.1", "ready": False, "restarts": 0}
    endings = () if outcome is None else (Ending(outcome, attempt),)
    return ObservedPod(**{"name": name, "attempt": attempt, "endings": endings, **nothing, **place, **more})


def pod_as_read(
    name: str, container: dict[str, Any] | None = None, *, metadata: dict[str, Any] | None = None, **status: Any
) -> ObservedPod:
    """Return a pod of attempt 0 as it is read of what the API server shows, with this status of its container."""
    if container is not None:
        status["containerStatuses"] = [{"name": names.CONTAINER, **container}]
    known = {"name": name, "uid": f"{name}-0", "labels": {names.LABEL_ATTEMPT: "0"}}
    return read_pod({"metadata": known | (metadata or {}), "spec": {"nodeName": "node"}, "status": status})


def a_set(name: str, role: str = "trainer", replicas: int = 1) -> Child:
    """Return a StatefulSet."""
    metadata = {"name": name, "uid": name, "labels": {names.LABEL_ROLE: role}}
    return read_child("StatefulSet", {"metadata": metadata, "spec": {"replicas": replicas}})


def ended(exit_code: int, reason: str = "Done", at: datetime = NOW) -> MemberOutcome:
    """Return the outcome of a pod that ended."""
    return MemberOutcome(exit_code=exit_code, reason=reason, message=f"said {reason}", finished_at=at)


def observed(*pods: ObservedPod, **more: Any) -> Observed:
    """Return a job's observed state with these pods, and `more` of its fields."""
    return Observed(pods={each.name: each for each in pods}, **more)


def pod_templates(made: Job, avoid: Sequence[str] = ()) -> dict[str, Any]:
    """Return the pod templates of a job's groups, by their names."""
    children = manifests(made, plan_topology(made), 0, avoid)
    sets = [child for child in children if child["kind"] == "StatefulSet"]
    return {one["metadata"]["name"].removeprefix(f"{made.name}-"): one["spec"]["template"] for one in sets}


def pod_specs(made: Job, avoid: Sequence[str] = ()) -> dict[str, Any]:
    """Return the pod specs of a job's groups, by their names."""
    return {name: template["spec"] for name, template in pod_templates(made, avoid).items()}


def world(**changes: Any) -> tuple[Job, Topology]:
    """Return a job and its topology."""
    made = job(**changes)
    return made, plan_topology(made)
