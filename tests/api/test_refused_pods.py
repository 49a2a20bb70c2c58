"""A pod that the cluster refuses, or whose volumes do not mount: the job says so within seconds, in the cluster's
words, wherever one looks.

The controllers and the admission are real; none of them asks the operator. The test speaks for the kubelet.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from grpo_cli.main import main
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, conditions, make_job

ONE = {"trainer": {"groups": [{"name": "a", "replicas": 1, "gpus": 1}]}}
OF_THE_CLUSTER = "validatingadmissionpolicybinding,validatingadmissionpolicy,validatingwebhookconfiguration"
SECONDS = 10
"""Within which the words must stand in the job."""

PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
OWNED = {"expression": "'owner' in object.metadata.labels", "message": "pods need the label owner"}
ADMISSION = "admissionregistration.k8s.io/v1"


def _of(jobs: Jobs) -> dict[str, Any]:
    """Select the test's namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": jobs.namespace}}}


def _lacks_quota(jobs: Jobs) -> None:
    jobs("create", "quota", "compute", "--hard=limits.cpu=4,limits.memory=8Gi")


def _exceeds_its_range(jobs: Jobs) -> None:
    limit = {"type": "Container", "max": {"memory": "1Gi"}}
    jobs.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": [limit]}})


def _violates_pod_security(jobs: Jobs) -> None:
    jobs.kubectl("label", "namespace", jobs.namespace, "pod-security.kubernetes.io/enforce=restricted")


def _lacks_a_label(jobs: Jobs) -> None:
    named: dict[str, Any] = {"apiVersion": ADMISSION, "metadata": {"name": jobs.namespace}}
    policy = {"matchConstraints": {"resourceRules": [PODS]}, "validations": [OWNED]}
    jobs.apply(named | {"kind": "ValidatingAdmissionPolicy", "spec": policy})
    binding = {"policyName": jobs.namespace, "validationActions": ["Deny"], "matchResources": _of(jobs)}
    jobs.apply(named | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding})
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "any-"}}
    pod["spec"] = {"containers": [{"name": "any", "image": "any"}]}

    def is_in_force() -> bool:
        try:
            jobs("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        except RuntimeError:
            return True
        return False

    wait_until(is_in_force, "the policy is in force", 60, interval=0.5)


def _meets_a_dead_webhook(jobs: Jobs) -> None:
    hook = {"name": "dead.example.com", "clientConfig": {"url": "https://127.0.0.1:1/"}, "rules": [PODS]}
    hook |= {"sideEffects": "None", "admissionReviewVersions": ["v1"]} | _of(jobs)
    kind = {"apiVersion": ADMISSION, "kind": "ValidatingWebhookConfiguration"}
    jobs.apply(kind | {"metadata": {"name": jobs.namespace}, "webhooks": [hook]})


HUGE = {"resources": {"limits": {"cpu": "8", "memory": "64Gi"}}}
ROOT_USER = {"securityContext": {"runAsNonRoot": False}}
AS_ROOT = 'violates PodSecurity "restricted:latest": runAsNonRoot != true'
CASES = {
    "quota": (_lacks_quota, {}, "QuotaExceeded", "failed quota: compute: must specify limits.cpu"),
    "used-up": (_lacks_quota, HUGE, "QuotaExceeded", "exceeded quota: compute, requested: limits.cpu=8"),
    "range": (_exceeds_its_range, HUGE, "ChildRefused", "maximum memory usage per Container is 1Gi"),
    "restricted": (_violates_pod_security, ROOT_USER, "ChildRefused", AS_ROOT),
    "policy": (_lacks_a_label, {}, "ChildRefused", "pods need the label owner"),
    "webhook": (_meets_a_dead_webhook, {}, "ChildRefused", 'failed calling webhook "dead.example.com"'),
}


def test_the_words_of_a_refusal_stand_in_the_job_within_seconds(jobs: Jobs, kubeconfig: Path) -> None:
    """All cases at once, each in a namespace of its own."""
    places = {name: Jobs(jobs.kubectl, f"{jobs.namespace}-{name}") for name in CASES}
    try:
        for name, place in places.items():
            jobs.kubectl("create", "namespace", place.namespace)
            CASES[name][0](place)
        for name, place in places.items():
            place.apply(make_job("refused", **ONE, podTemplate=CASES[name][1]))
        for name, place in places.items():
            *_, reason, words = CASES[name]
            place.wait_for("refused", "Accepted", "True")
            refused = place.wait_for("refused", "Scheduled", "False", reason, timeout=SECONDS)
            assert refused["message"].startswith("0 of 1 pod exists; the cluster refuses pod refused-a-0"), name
            assert words in refused["message"], name
            events = [one for one in place.list("events.events.k8s.io") if one["regarding"]["kind"] == "GRPOJob"]
            assert any(words in one["note"] for one in events), name
            assert words in place("get", "grpo", "refused", "-o", "wide"), name
            where = ("--kubeconfig", str(kubeconfig), "--namespace", place.namespace)
            assert words in " ".join(CliRunner().invoke(main, ["status", "refused", *where]).output.split()), name
    finally:
        for place in places.values():
            place("delete", OF_THE_CLUSTER, place.namespace, "--ignore-not-found")
            jobs.kubectl("delete", "namespace", place.namespace, "--wait=false", "--ignore-not-found")


def test_a_volume_that_cannot_be_mounted_stands_in_the_job_within_seconds(jobs: Jobs) -> None:
    jobs.run("mounts", **ONE)
    container = {"name": "grpo", "ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    container["state"] = {"waiting": {"reason": "ContainerCreating"}}
    unready = [*conditions(False), {"type": "PodReadyToStartContainers", "status": "False"}]
    jobs.report("mounts-a-0", containerStatuses=[container], conditions=unready)
    starting = jobs.wait_for("mounts", "Running", "False", "Starting")
    assert starting["message"] == "0 of 1 pod is ready; no longer ready: mounts-a-0"

    missing = 'MountVolume.SetUp failed for volume "creds" : secret "creds" not found'
    pod = jobs.get("pod", "mounts-a-0")["metadata"]
    said = (("FailedScheduling", "of another time"), ("FailedMount", missing), ("Unhealthy", "a probe's"))
    for reason, words in said:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"kind": "Pod", "apiVersion": "v1"} | {key: pod[key] for key in ("namespace", "name", "uid")}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": reason.lower()}, "type": "Warning"}
        event |= {"reason": reason, "message": words, "lastTimestamp": at, "source": {"component": "kubelet"}}
        jobs.apply(event | {"involvedObject": about})
    waits = jobs.wait_for("mounts", "Running", "False", "ContainerWaiting", timeout=3 * SECONDS)
    where = f"pod mounts-a-0 on node {jobs.get('pod', 'mounts-a-0')['spec']['nodeName']}"
    assert waits["message"] == f"{where}: FailedMount: {missing}"
    assert missing in jobs("get", "grpo", "mounts", "-o", "wide")
    jobs.runs_again("mounts-a-0")
    jobs.wait_for("mounts", "Running", "True")
