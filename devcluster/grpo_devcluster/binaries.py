"""Kubernetes and its helpers, built from pinned Go modules into a cache."""

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_devcluster import paths
from grpo_devcluster.locks import locked
from grpo_devcluster.progress import say, step

KUBERNETES = "v1.36.3"
CONTAINERD = "v2.4.2"
KWOK_STAGES = "kwok-stages.yaml"

Scope = Literal["controlplane", "all"]


@dataclass(frozen=True)
class Group:
    """The programs of one Go module; a module of its own keeps one tool's dependencies from moving another's."""

    module: str
    packages: dict[str, str]
    scope: Scope
    ldflags: str = ""


_VERSION = "k8s.io/component-base/version"
_K8S_FLAGS = f"-X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=36 -X {_VERSION}.gitTreeState=clean"
_K8S = "k8s.io/kubernetes/cmd"
_CONTAINERD = "github.com/containerd/containerd/v2"

GROUPS = (
    Group(
        "kubernetes",
        {
            "etcd": "go.etcd.io/etcd/server/v3",
            "kube-apiserver": f"{_K8S}/kube-apiserver",
            "kube-controller-manager": f"{_K8S}/kube-controller-manager",
            "kube-scheduler": f"{_K8S}/kube-scheduler",
            "kubectl": f"{_K8S}/kubectl",
        },
        "controlplane",
        _K8S_FLAGS,
    ),
    Group("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, "controlplane"),
    Group("kubernetes", {"kubelet": f"{_K8S}/kubelet", "kube-proxy": f"{_K8S}/kube-proxy"}, "all", _K8S_FLAGS),
    Group(
        "containerd",
        {
            "containerd": f"{_CONTAINERD}/cmd/containerd",
            "containerd-shim-runc-v2": f"{_CONTAINERD}/cmd/containerd-shim-runc-v2",
            "ctr": f"{_CONTAINERD}/cmd/ctr",
        },
        "all",
        f"-X {_CONTAINERD}/version.Version={CONTAINERD}",
    ),
    Group("coredns", {"coredns": "github.com/coredns/coredns"}, "all"),
    Group("pause", {"pause": "."}, "all"),
    Group("helm", {"helm": "helm.sh/helm/v4/cmd/helm"}, "all"),
)


def cache_key(tools: Path = paths.TOOLS) -> str:
    """Hash of everything that decides what the binaries are: module files, own sources and build settings."""
    digest = hashlib.sha256(repr(GROUPS).encode())
    for file in sorted(p for p in tools.rglob("*") if p.name in {"go.mod", "go.sum"} or p.suffix == ".go"):
        digest.update(str(file.relative_to(tools)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def bin_dir() -> Path:
    """Folder of the binaries that belong to this checkout."""
    return paths.cache_dir() / "bin" / cache_key()


def binary(name: str) -> Path:
    """Path of one built program."""
    path = bin_dir() / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is not built yet: run `python -m grpo_devcluster build`")
    return path


def build(scope: Scope = "all") -> Path:
    """Build what is missing; returns the folder."""
    with locked(bin_dir()):
        return _build(scope, bin_dir())


def _build(scope: Scope, target: Path) -> Path:
    wanted = [g for g in GROUPS if scope == "all" or g.scope == "controlplane"]
    missing = [(g, n, p) for g in wanted for n, p in g.packages.items() if not (target / n).exists()]
    for number, (group, name, package) in enumerate(missing, 1):
        with step(f"build {name} ({number} of {len(missing)})"):
            _go_build(group, package, target / name)
    stages = target / KWOK_STAGES
    if not stages.exists():
        stages.write_text(_kwok_stages())
    if not missing:
        say(f"binaries are built: {target}")
    return target


def _go(*args: str, module: str) -> str:
    if shutil.which("go") is None:
        raise FileNotFoundError("the devcluster builds Kubernetes from source: install Go 1.26 or newer")
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly", "GOWORK": "off"}
    done = subprocess.run(["go", *args], cwd=paths.TOOLS / module, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _go_build(group: Group, package: str, target: Path) -> None:
    # Renamed into place, so that an interrupted build never leaves half a binary under the final name.
    unfinished = target.with_suffix(".building")
    flags = f"-s -w {group.ldflags}".strip()
    no_dwarf = "-gcflags=all=-dwarf=false"  # which -s and -w would drop, and takes an eighth of the time to make
    _go("build", "-trimpath", no_dwarf, "-ldflags", flags, "-o", str(unfinished), package, module=group.module)
    unfinished.rename(target)


def _kwok_stages() -> str:
    module = json.loads(_go("mod", "download", "-json", "sigs.k8s.io/kwok", module="kwok"))
    folder = Path(module["Dir"]) / "kustomize" / "stage"
    names = (
        "node/fast/node-initialize.yaml",
        "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
        "pod/fast/pod-ready.yaml",
        "pod/fast/pod-complete.yaml",
        "pod/fast/pod-delete.yaml",
    )
    return "---\n".join((folder / name).read_text() for name in names)
