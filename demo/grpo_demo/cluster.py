"""The demo on a real Kubernetes on one machine: nodes, operator and job as on any cluster."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from grpo_demo import model, watch
from grpo_demo.console import DemoError, console, step
from grpo_demo.kubectl import Kubectl
from grpo_demo.report import Run
from grpo_devcluster import binaries, images, packages, paths, storage
from grpo_devcluster.cluster import Cluster

CHART = paths.REPO / "charts" / "grpo-operator"
NAMESPACE = "default"


def run_job(manifest: Path) -> Run:
    """Build Kubernetes, start it, and run the job to its end. Raises DemoError after printing what explains it.

    `scripts/demo.sh` has started the build in the background; what needs no Kubernetes comes first here.
    """
    name = job_name(manifest)
    model.install()
    with step("The operator's image, and the Debian packages that nodes need"):
        packages.ensure(packages.NODE | packages.IMAGES)
        archive = images.build_operator()
    with step("Kubernetes, built from source in the background, once"):
        binaries.build("cluster")
    cluster = Cluster()
    with step("The cluster: etcd, API server, scheduler, controllers, DNS, and two nodes (kubelet and containerd)"):
        cluster.up()
        cluster.load(archive)
    kubectl = Kubectl(cluster.kubeconfig, NAMESPACE)
    gpus, version = ".status.allocatable.nvidia\\.com/gpu", ".status.nodeInfo.kubeletVersion"
    kubectl.show("get", "nodes", "-o", f"custom-columns=NODE:.metadata.name,GPUS:{gpus},VERSION:{version}")
    with step(f"helm install {CHART.relative_to(paths.REPO)}"):
        install_operator(kubectl, archive)
    try:
        return _train(kubectl, manifest, name)
    except DemoError:
        kubectl.diagnose(name)
        raise


def install_operator(kubectl: Kubectl, archive: Path) -> None:
    """Install or upgrade the operator by its chart, with the image of `archive`."""
    repository, tag = images.OPERATOR.split(":")
    image = ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]
    # The tag never changes. The archive's name changes with its content; as an annotation it rolls the Deployment.
    rollout = ["--set-string", f"podAnnotations.demo/image={archive.stem}"]
    where = ["--namespace", "grpo-system", "--create-namespace"]
    kubectl.helm("upgrade", "--install", "grpo-operator", CHART, *where, *image, *rollout, "--wait", "--timeout", "3m")


def _train(kubectl: Kubectl, manifest: Path, name: str) -> Run:
    with step(f"kubectl apply -f {manifest}"):
        # Foreground: returns when the pods of an earlier run are gone and their GPUs are free.
        kubectl.show("delete", "grpojob", name, "--ignore-not-found", "--cascade=foreground", "--timeout=5m")
        kubectl.show("apply", "-f", str(manifest))
    job = kubectl.get("grpojob", name)
    storage_spec = job["spec"]["storage"]
    kubectl.show("wait", f"pvc/{storage_spec['claimName']}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
    data = storage.claim_path(kubectl.kubeconfig, NAMESPACE, storage_spec["claimName"]) / storage_spec.get(
        "subPath", ""
    )
    folder = data / NAMESPACE / name / job["metadata"]["uid"]
    with step(f"Training (its folder: {folder})"):
        job = watch.until_finished(lambda: kubectl.get("grpojob", name), folder / "metrics.jsonl")
    kubectl.show("get", "grpojobs")
    if not watch.condition(job, "Complete"):
        raise DemoError(f"the job failed: {job['status'].get('lastFailure', {}).get('message', 'no message')}")
    return Run(folder, data / job["status"]["checkpoint"])


def how_to_look_around() -> None:
    """Print how to reach and how to stop the cluster, which stays up."""
    cluster = Cluster()
    if not cluster.running():
        return
    console.print("\nThe cluster stays up. To look around:")
    for text in (
        f"export KUBECONFIG={cluster.kubeconfig} PATH={shlex.quote(str(binaries.bin_dir()))}:$PATH",
        "kubectl get grpojobs,pods -A -o wide; kubectl describe grpojob; kubectl explain grpojob.spec",
        "make down   # stops it",
    ):
        console.print(f"   {text}", markup=False, soft_wrap=True)


def job_name(manifest: Path) -> str:
    """Return the name of the one GRPOJob in a manifest.

    Raises DemoError when there is none, or more than one, or one without a claim, where the demo reads what it shows.
    """
    jobs = [
        document for document in yaml.safe_load_all(manifest.read_text()) if document and document["kind"] == "GRPOJob"
    ]
    if len(jobs) != 1:
        raise DemoError(f"{manifest} holds {len(jobs)} GRPOJobs; the demo runs exactly one")
    if not jobs[0].get("spec", {}).get("storage", {}).get("claimName"):
        raise DemoError(f"{manifest}: the demo reads metrics from the job's volume; name a claim in storage.claimName")
    return str(jobs[0]["metadata"]["name"])
