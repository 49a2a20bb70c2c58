"""README's installation on real kubelets.

Asserted: the operator's image needs no packages of ours but the spec's and its own; `helm uninstall` keeps the jobs,
`helm install` and `helm test` succeed, `helm upgrade` replaces the operator's pods, and the operator then starts a job
that was suspended all the while.
"""

import json
import re

import pytest

from grpo_devcluster import images, kube
from grpo_devcluster.paths import REPO
from grpo_devcluster.progress import wait_until

pytestmark = pytest.mark.timeout(1200)

WHERE = ("--namespace", "grpo-system")


IMPORT_ALL = """
import importlib, pkgutil
for package in ("grpo_spec", "grpo_operator"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sorted(module.name for module in pkgutil.iter_modules() if module.name.startswith("grpo_")))
"""


def test_the_operators_image_imports_all_that_it_holds(operator, kubectl):
    """It holds no package of the workload or of the command line."""
    printed = kubectl("exec", *WHERE, "deployment/grpo-operator", "--", "python3", "-c", IMPORT_ALL)
    assert printed.split() == ["grpo_operator", "grpo_spec"]


def test_jobs_outlive_their_operator_and_the_installation_tests_itself(job, devcluster):
    def helm(*args):
        return kube.helm(devcluster.kubeconfig, *args, *WHERE)

    def operators_pods():
        selector = "app.kubernetes.io/name=grpo-operator"
        return {*job.kubectl("get", "pods", *WHERE, "-l", selector, "-o", "jsonpath={.items[*].metadata.uid}").split()}

    job.apply(suspend=True)
    job("wait", "grpojob/tiny", "--for=condition=Suspended", "--timeout=120s")
    uid = job.get()["metadata"]["uid"]
    annotations = json.loads(helm("get", "values", "grpo-operator", "-o", "json"))["podAnnotations"]
    helm("uninstall", "grpo-operator", "--wait", "--timeout", "3m")
    assert job.get()["metadata"]["uid"] == uid
    wait_until(lambda: not operators_pods(), "the operator's pods are gone", 120)

    repository, tag = images.OPERATOR.split(":")
    values = ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]
    values += [f"--set-json=podAnnotations={json.dumps(annotations)}"]
    chart = str(REPO / "charts" / "grpo-operator")
    helm("install", "grpo-operator", chart, "--create-namespace", *values, "--wait", "--timeout", "4m")
    assert re.search(
        r"TEST SUITE:\s+grpo-operator-test(.|\n)*Phase:\s+Succeeded", helm("test", "grpo-operator", "--timeout", "3m")
    )
    before = operators_pods()
    assert len(before) == 2
    helm(
        "upgrade",
        "grpo-operator",
        chart,
        "--reset-then-reuse-values",
        "--set",
        "logFormat=json",
        "--wait",
        "--timeout",
        "4m",
    )
    wait_until(lambda: not before & operators_pods(), "the earlier pods of the operator are gone", 120)
    job("patch", "grpojob", "tiny", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    job("wait", "grpojob/tiny", "--for=condition=Scheduled", "--timeout=120s")
    job("delete", "grpojob", "tiny", "--timeout=120s")
