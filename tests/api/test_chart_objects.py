"""The API server accepts the chart's objects, and the chart's roles reach Kubernetes' own."""

import json
import subprocess
from collections.abc import Callable

import pytest
import yaml

from grpo_devcluster import binaries
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Release
from support.paths import ROOT

Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def rendered() -> list[dict]:
    """All objects that the chart can render."""
    helm = [binaries.binary("helm"), "template", "second", ROOT / "charts/grpo-operator"]
    more = ["--set", "networkPolicy.enabled=true"]
    text = subprocess.run([*helm, *more], capture_output=True, text=True, check=True).stdout
    return [o for o in yaml.safe_load_all(text) if o]


def test_every_object_is_accepted_as_it_is(kubectl: Kubectl, namespace: str, rendered: list[dict]) -> None:
    for manifest in rendered:
        if manifest["kind"] == "Pod":  # of `helm test`: it needs an existing account, and a dry run creates none
            manifest = manifest | {"spec": manifest["spec"] | {"serviceAccountName": "default"}}
            kubectl("wait", "serviceaccount/default", "-n", namespace, "--for=create", "--timeout=30s")
        if "namespace" in manifest["metadata"]:
            manifest = manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}
        arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
        kubectl(*arguments, stdin=yaml.safe_dump(manifest))


@pytest.mark.parametrize("kind", ["Deployment", "Pod"], ids=["operator", "helm-test"])
def test_pods_pass_restricted_pod_security(kubectl: Kubectl, namespace: str, rendered: list[dict], kind: str) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    found = next(o for o in rendered if o["kind"] == kind)["spec"]
    spec = found.get("template", {}).get("spec", found) | {"serviceAccountName": "default"}
    kubectl("wait", "serviceaccount/default", "-n", namespace, "--for=create", "--timeout=30s")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "strict", "namespace": namespace}, "spec": spec}
    kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))
    pod["spec"] = spec | {"containers": [spec["containers"][0] | {"securityContext": {}}]}
    with pytest.raises(RuntimeError, match='violates PodSecurity "restricted'):
        kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))


def test_editors_of_a_namespace_manage_jobs_and_viewers_see_them(
    release: Release, kubectl: Kubectl, namespace: str
) -> None:
    for role in ("view", "edit", "admin"):
        kubectl("create", "rolebinding", role, "-n", namespace, f"--clusterrole={role}", f"--user={role}")

    def may(who: str, verb: str) -> bool:
        asked = {"namespace": namespace, "verb": verb, "group": "training.grpo.dev", "resource": "grpojobs"}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        body |= {"spec": {"user": who, "resourceAttributes": asked}}
        return bool(json.loads(kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(body)))["status"]["allowed"])

    # Another controller copies the rules into Kubernetes' own roles.
    wait_until(
        lambda: may("view", "list") and may("edit", "create") and may("admin", "delete"), "the roles are extended", 30
    )
    assert not may("view", "create")
    assert may("edit", "get")
    assert may("admin", "watch")
    assert not may("nobody", "list")
