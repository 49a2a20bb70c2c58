"""Changes of a child that wake its job: those that a plan can depend on, and no others."""

from typing import Any

import pytest

from grpo_operator.api import names
from grpo_operator.layout.downloads import download_job
from grpo_operator.layout.manifests import manifests
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.scopes import Scope
from support.control_plane.children import bare_job
from support.control_plane.jobs import world
from support.control_plane.memory_store import Object, Store

KEY = Key("ns", "job", "uid")
READY = {"type": "Ready", "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-01-01T00:00:00Z"}
LAUNCHER = {"name": names.CONTAINER, "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


def _children() -> dict[str, Object]:
    """Return a job's children by kind, and one of its pods."""
    made = {one["kind"]: one for one in manifests(*world(), attempt=0)}
    labels = made["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    pod = {
        "kind": "Pod",
        "metadata": {"namespace": "ns", "name": "job-a-0", "labels": labels},
        "spec": {"nodeName": "node"},
        "status": {"podIP": "10.0.0.1", "conditions": [READY], "containerStatuses": [LAUNCHER]},
    }
    return made | {"Pod": pod, "Job": download_job(*world())}


def _shown(kind: str) -> tuple[Mirror, Scope, Store, Object, list[Key]]:
    """Return a mirror that was told of a child of a job, and where it will say which jobs it wakes."""
    woken: list[Key] = []
    store, scope = Store(), Scope(kind, None)
    mirror = Mirror([scope], woken.append, lambda *_: None, lambda *_: None, lambda _: None)
    mirror.keep_job(bare_job("ns", "job", "uid", 1))
    child = store.put(_children()[kind])
    mirror.changed(scope, "ADDED", {"apiVersion": names.api_version(kind), "kind": kind} | child)
    assert woken == [KEY]
    woken.clear()
    return mirror, scope, store, child, woken


def _wakes(kind: str, change: dict[str, Any]) -> bool:
    """Whether a change, merged into an object, wakes the job. If not, the mirror shows the very same value, and nothing
    calls for a whole pass over a quiet job.
    """
    mirror, scope, store, child, woken = _shown(kind)
    (before,), versions = mirror.pods(KEY) or mirror.others(KEY), mirror.versions(KEY)
    mirror.changed(scope, "MODIFIED", store.put(_merged(child, change)))
    now = [value for _, value in mirror.pods(KEY) or mirror.others(KEY)]
    assert bool(woken) != (len(now) == 1 and now[0] is before[1])
    assert bool(woken) == (mirror.versions(KEY) != versions)
    return woken == [KEY]


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


FIELDS_OF_NO_PLAN = [
    {"managedFields": [{"manager": "kubelet", "time": "2026-01-01T00:00:00Z"}]},
    {"selfLink": "/somewhere"},
    {"generateName": "job-"},
]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, {"metadata": fields}) for kind in names.WATCHED_KINDS for fields in FIELDS_OF_NO_PLAN),
        ("StatefulSet", {"status": {"replicas": 1, "readyReplicas": 1, "observedGeneration": 2}}),
        ("Service", {"status": {"loadBalancer": {}}}),
        ("Pod", {"status": {"conditions": [{**READY, "lastProbeTime": "2026-01-01T00:01:00Z"}]}}),
        ("Pod", {"status": {"qosClass": "Guaranteed", "startTime": "2026-01-01T00:00:00Z", "hostIP": "10.1.0.1"}}),
        ("Pod", {"status": {"containerStatuses": [LAUNCHER, {"name": "sidecar", "restartCount": 3}]}}),
        ("Pod", {"metadata": {"annotations": {"cni": "10.0.0.1"}}}),
    ],
)
def test_news_of_other_controllers_wake_nobody(kind: str, change: dict[str, Any]) -> None:
    assert not _wakes(kind, change)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Pod", {"status": {"conditions": [{**READY, "status": "False"}]}}),
        ("Pod", {"status": {"conditions": [READY, {"type": "DisruptionTarget", "status": "True"}]}}),
        ("Pod", {"status": {"containerStatuses": [{**LAUNCHER, "restartCount": 1}]}}),
        ("Pod", {"status": {"containerStatuses": [{**LAUNCHER, "state": {"terminated": {"exitCode": 1}}}]}}),
        ("Pod", {"status": {"podIP": "10.0.0.2"}}),
        ("Pod", {"spec": {"nodeName": "another"}}),
        ("Pod", {"metadata": {"deletionTimestamp": "2026-01-01T00:05:00Z"}}),
        ("Pod", {"metadata": {"labels": {names.LABEL_JOB_UID: "another"}}}),
        ("Pod", {"metadata": {"labels": {names.LABEL_ATTEMPT: "7"}}}),
        ("StatefulSet", {"spec": {"replicas": 9}}),
        ("StatefulSet", {"metadata": {"labels": {names.LABEL_JOB_UID: "another"}}}),
        ("StatefulSet", {"metadata": {"deletionTimestamp": "2026-01-01T00:05:00Z"}}),
        ("Service", {"metadata": {"ownerReferences": []}}),
        ("NetworkPolicy", {"spec": {"ingress": []}}),
        ("ConfigMap", {"data": {"contract.json": "{}"}}),
        ("ConfigMap", {"metadata": {"annotations": {"changed": "by hand"}}}),
    ],
)
def test_what_a_plan_depends_on_wakes_the_job(kind: str, change: dict[str, Any]) -> None:
    assert _wakes(kind, change)


def test_a_job_that_another_of_its_name_replaces_is_gone_and_gets_a_last_pass() -> None:
    """Its deletion was missed: no event of it comes any more."""
    woken: list[Key] = []
    gone: list[Key] = []
    mirror = Mirror([], woken.append, lambda *_: None, lambda *_: None, gone.append)
    mirror.keep_job(bare_job("ns", "job", "uid", 1))
    mirror.keep_job(bare_job("ns", "job", "next", 2))
    assert (gone, woken, mirror.job_keys()) == ([KEY], [KEY], [Key("ns", "job", "next")])
    mirror.end_list_of_jobs(None, mirror.list_jobs([]), "3")
    assert (gone[1:], woken[1:], mirror.job_keys()) == ([Key("ns", "job", "next")], [Key("ns", "job", "next")], [])


@pytest.mark.parametrize("kind", [kind for kind in names.WATCHED_KINDS if kind in _children()])
def test_a_list_that_shows_what_a_watch_showed_wakes_nobody(kind: str) -> None:
    """Items of a list lack `apiVersion` and `kind`, with which objects of a watch begin."""
    mirror, scope, _, child, woken = _shown(kind)
    newer = child["metadata"] | {"resourceVersion": "9"}
    listed = {k: v for k, v in child.items() if k not in ("apiVersion", "kind")} | {"metadata": newer}
    mirror.end_list(scope, mirror.list_part(scope, [listed]), "9")
    assert woken == []
