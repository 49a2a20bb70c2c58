"""The demo on a real Kubernetes: nodes, operator and job as on any cluster, on one machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from grpo_demo import model, watch
from grpo_demo.console import DemoError, console, step
from grpo_demo.kubectl import Kubectl
from grpo_demo.report import Run
from grpo_devcluster import binaries, images, paths, storage
from grpo_devcluster.cluster import Cluster

CHART = paths.REPO / "charts" / "grpo-operator"
NAMESPACE = "default"


def run_job(manifest: Path) -> Run:
    """Everything from building Kubernetes to the end of the job. Raises DemoError, after saying what a person would look at."""
    with step("Kubernetes, built from source (the first time takes about 8 minutes on two cores)"):
        binaries.build()
    with step("The operator's image"):
        archive = images.build_operator()
    model.install()
    cluster = Cluster()
    with step("Two nodes: etcd, API server, scheduler, controllers, DNS, and a kubelet and a containerd each"):
        cluster.up()
        cluster.load(archive)
    kubectl = Kubectl(cluster.kubeconfig, NAMESPACE)
    kubectl.show(
        "get",
        "nodes",
        "-o",
        "custom-columns=NODE:.metadata.name,GPUS:.status.allocatable.nvidia\\.com/gpu,VERSION:.status.nodeInfo.kubeletVersion",
    )
    with step(f"helm install {CHART.relative_to(paths.REPO)}"):
        install_operator(kubectl, archive)
    name = job_name(manifest)
    try:
        return _train(kubectl, manifest, name)
    except DemoError:
        kubectl.diagnose(name)
        raise


def install_operator(kubectl: Kubectl, archive: Path) -> None:
    repository, tag = images.OPERATOR.split(":")
    image = ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]
    # The tag never changes; the archive's name does with its content, and a changed annotation rolls the Deployment.
    rollout = ["--set-string", f"podAnnotations.demo/image={archive.stem}"]
    where = ["--namespace", "grpo-system", "--create-namespace"]
    kubectl.helm("upgrade", "--install", "grpo-operator", CHART, *where, *image, *rollout, "--wait", "--timeout", "3m")


def _train(kubectl: Kubectl, manifest: Path, name: str) -> Run:
    with step(f"kubectl apply -f {manifest}"):
        # Foreground: returns when the pods of an earlier run are gone too, and their GPUs free.
        kubectl.show("delete", "grpojob", name, "--ignore-not-found", "--cascade=foreground", "--timeout=5m")
        kubectl.show("apply", "-f", str(manifest))
    job = kubectl.get("grpojob", name)
    storage_spec = job["spec"]["storage"]
    kubectl.show("wait", f"pvc/{storage_spec['claimName']}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
    data = storage.claim_path(kubectl.kubeconfig, NAMESPACE, storage_spec["claimName"]) / storage_spec.get("subPath", "")
    folder = data / NAMESPACE / name / job["metadata"]["uid"]
    with step(f"Training (its folder: {folder})"):
        job = watch.until_finished(lambda: kubectl.get("grpojob", name), folder / "metrics.jsonl")
    kubectl.show("get", "grpojobs")
    if not watch.condition(job, "Complete"):
        raise DemoError(f"the job failed: {job['status'].get('lastFailure', {}).get('message', 'no message')}")
    return Run(folder, data / job["status"]["checkpoint"])


def how_to_look_around() -> None:
    """The cluster stays up: say how to reach it and how to end it."""
    cluster = Cluster()
    if not cluster.running():
        return
    console.print("\nThe cluster stays up. To look around:")
    for text in (
        f"export KUBECONFIG={cluster.kubeconfig} PATH={shlex.quote(str(binaries.bin_dir()))}:$PATH",
        "kubectl get grpojobs,pods -A -o wide; kubectl describe grpojob; kubectl explain grpojob.spec",
        "make down   # ends it",
    ):
        console.print(f"   {text}", markup=False, soft_wrap=True)


def job_name(manifest: Path) -> str:
    """Name of the one GRPOJob in a manifest. Raises DemoError when there is none, or more than one."""
    names = [d["metadata"]["name"] for d in yaml.safe_load_all(manifest.read_text()) if d and d["kind"] == "GRPOJob"]
    if len(names) != 1:
        raise DemoError(f"{manifest} holds {len(names)} GRPOJobs; the demo runs exactly one")
    return str(names[0])
