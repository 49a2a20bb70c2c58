"""The chart's objects and the examples, to the API server's own taste."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from operator_fixture import ROOT, Operator

from grpo_devcluster import binaries

pytestmark = pytest.mark.api

Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def rendered() -> list[dict]:
    """All that the chart can render."""
    helm = [str(binaries.binary("helm")), "template", "second", str(ROOT / "charts/grpo-operator"), "--set", "networkPolicy.enabled=true"]
    text = subprocess.run(helm, capture_output=True, text=True, check=True).stdout
    return [o for o in yaml.safe_load_all(text) if o]


def test_every_object_is_accepted_as_it_is(kubectl: Kubectl, namespace: str, rendered: list[dict]) -> None:
    for manifest in rendered:
        if "namespace" in manifest["metadata"]:
            manifest = manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}
        arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
        kubectl(*arguments, stdin=yaml.safe_dump(manifest))


def test_the_operators_pod_passes_restricted_pod_security(kubectl: Kubectl, namespace: str, rendered: list[dict]) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    template = next(o for o in rendered if o["kind"] == "Deployment")["spec"]["template"]
    spec = template["spec"] | {"serviceAccountName": "default"}
    kubectl("wait", "serviceaccount/default", "-n", namespace, "--for=create", "--timeout=30s")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator", "namespace": namespace}, "spec": spec}
    kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))
    spec["containers"][0] |= {"securityContext": {}}
    with pytest.raises(RuntimeError, match='violates PodSecurity "restricted'):
        kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_accepted(operator: Operator, kubectl: Kubectl, namespace: str, path: Path) -> None:
    kubectl("apply", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", str(path))
