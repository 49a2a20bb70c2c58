"""Kubernetes and the programs around it, built from one Go module of pinned versions into the cache.

The oldest control plane that the chart allows has a module of its own.

Imports only the standard library, so that `make` can start compiling before Python packages are installed:
`python3 -m grpo_devcluster.binaries cluster`.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, get_args

from grpo_devcluster import paths
from grpo_devcluster.locks import locked
from grpo_devcluster.progress import say, step

KUBERNETES = "v1.37.2"
OLDEST_KUBERNETES = "v1.30.14"
CONTAINERD = "v2.4.2"
KWOK_STAGES = "stages.yaml"

Scope = Literal["cluster", "controlplane", "all", "oldest"]

_K8S = "k8s.io/kubernetes/cmd"
_CONTAINERD = "github.com/containerd/containerd/v2"
_CONTROL_PLANE = {
    "kube-apiserver": f"{_K8S}/kube-apiserver",
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-controller-manager": f"{_K8S}/kube-controller-manager",
    "kube-scheduler": f"{_K8S}/kube-scheduler",
    "kubectl": f"{_K8S}/kubectl",
}
_NODES = {
    "kubelet": f"{_K8S}/kubelet",
    "kube-proxy": f"{_K8S}/kube-proxy",
    "containerd": f"{_CONTAINERD}/cmd/containerd",
    "containerd-shim-runc-v2": f"{_CONTAINERD}/cmd/containerd-shim-runc-v2",
    "ctr": f"{_CONTAINERD}/cmd/ctr",
    "coredns": "./coredns",
    "pause": "./pause",
    "helm": "helm.sh/helm/v4/cmd/helm",
}
_FAKE_NODES = {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}
_TESTS = {"verdicts": "./verdicts"}
PROGRAMS: dict[Scope, dict[str, str]] = {
    "cluster": _CONTROL_PLANE | _NODES,
    "controlplane": _CONTROL_PLANE | _FAKE_NODES | _TESTS,
    "all": _CONTROL_PLANE | _NODES | _FAKE_NODES | _TESTS,
    "oldest": {name: _CONTROL_PLANE[name] for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")},
}
"""Packages by program, most needed first: for real nodes (cluster), for tests on fake ones (controlplane), for both
(all), and what an oldest control plane has instead of the newest (oldest)."""

# KWOK's own deletes again on the event of its deletion, by name: on a busy machine that hits the next pod of this name.
_POD_DELETE = """
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-delete}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: Exists}
    - {key: .metadata.deletionGracePeriodSeconds == 0, operator: NotIn, values: ["true"]}
  next: {delete: true}
"""

_VERSION = "k8s.io/component-base/version"


def _flags(kubernetes: str) -> tuple[str, ...]:
    symbols = {
        f"{_VERSION}.gitVersion": kubernetes,
        f"{_VERSION}.gitMajor": "1",
        f"{_VERSION}.gitMinor": kubernetes.split(".")[1],
        f"{_VERSION}.gitTreeState": "clean",
        f"{_CONTAINERD}/version.Version": CONTAINERD,
    }
    return (
        "-trimpath",
        "-gcflags=all=-dwarf=false",  # which -s and -w would drop, and takes an eighth of the time to make
        f"-ldflags=-s -w {' '.join(f'-X {symbol}={value}' for symbol, value in symbols.items())}",
    )


_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-buildvcs=false -mod=readonly",
    "GOWORK": "off",
    # Without garbage collection the compilers need an eighth less CPU.
    "GOGC": "off",
    "GOMEMLIMIT": "2GiB",
}


def cache_key(tools: Path = paths.TOOLS) -> str:
    """Return a hash of everything that decides what the binaries are: module files, sources, build settings."""
    digest = hashlib.sha256(repr((PROGRAMS["all"], _flags(KUBERNETES))).encode())
    for file in sorted(p for p in tools.rglob("*") if p.name in {"go.mod", "go.sum"} or p.suffix == ".go"):
        digest.update(str(file.relative_to(tools)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def bin_dir(scope: Scope = "all") -> Path:
    """Return the folder of the binaries that belong to this checkout; those of the oldest Kubernetes have their own."""
    if scope == "oldest":
        return paths.cache_dir() / "bin" / f"{OLDEST_KUBERNETES}-{cache_key(paths.OLDEST)}"
    return paths.cache_dir() / "bin" / cache_key()


def binary(name: str, *, oldest: bool = False) -> Path:
    """Return the path of a built program, with `oldest` that of the oldest Kubernetes if it has one of this name.

    Raises FileNotFoundError, which names the command that builds it.
    """
    scope: Scope = "oldest" if oldest and name in PROGRAMS["oldest"] else "all"
    path = bin_dir(scope) / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is not built yet: run `python -m grpo_devcluster build --only {scope}`")
    return path


def build(scope: Scope = "all") -> Path:
    """Build the missing programs, or wait for another process that builds them; returns the folder."""
    target = bin_dir(scope)
    with locked(target, lambda: _progress(target, scope)):
        missing = {name: package for name, package in PROGRAMS[scope].items() if not (target / name).exists()}
        if missing:
            with step(f"build {len(missing)} programs from source"):
                _go_build(missing, target, scope)
        if "kwok" in PROGRAMS[scope] and not (target / KWOK_STAGES).exists():
            (target / KWOK_STAGES).write_text(_kwok_stages())
        if not missing:
            say(f"binaries are built: {target}")
    return target


def _progress(target: Path, scope: Scope) -> str:
    """Describe a build that is under way: the first program that is missing, and how many exist."""
    names = list(PROGRAMS[scope])
    missing = [name for name in names if not (target / name).exists()]
    if not missing:
        return "waiting for the end of the build"
    return f"waiting for {missing[0]}, {len(names) - len(missing)} of {len(names)} built"


def _go_build(missing: dict[str, str], target: Path, scope: Scope) -> None:
    # One call for all: some programs are linked while others compile. Go names a program after its package's folder.
    # A program is renamed from `scratch` to `unfinished` (by Go) and to `target`, so that no file is ever half written.
    unfinished, scratch = target / "unfinished", target / "scratch"
    for folder in (unfinished, scratch):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    made = {name: "server" if name == "etcd" else Path(package).name for name, package in missing.items()}
    version, tools = (OLDEST_KUBERNETES, paths.OLDEST) if scope == "oldest" else (KUBERNETES, paths.TOOLS)
    command = ["build", *_flags(version), "-o", f"{unfinished}/", *missing.values()]
    shown = ""
    with subprocess.Popen(go(*command), cwd=tools, env=environment() | {"GOTMPDIR": str(scratch)}) as compiler:
        try:
            while compiler.poll() is None:
                time.sleep(0.5)
                _take(made, unfinished, target)
                if (news := _progress(target, scope)) != shown:
                    say(shown := news)
        finally:
            compiler.terminate()
    _take(made, unfinished, target)
    for folder in (unfinished, scratch):
        shutil.rmtree(folder)
    if compiler.returncode:
        raise RuntimeError(f"go build failed with {compiler.returncode}; its messages are above")


def _take(made: dict[str, str], unfinished: Path, target: Path) -> None:
    """Move the programs that are linked to their final names."""
    for name, file in made.items():
        if (unfinished / file).exists():
            (unfinished / file).rename(target / name)


def go(*arguments: str) -> list[str]:
    """Return a command line of Go. Raises FileNotFoundError if Go is not installed."""
    if shutil.which("go") is None:
        raise FileNotFoundError("the devcluster builds Kubernetes from source: install Go 1.26 or newer")
    return ["go", *arguments]


def environment() -> dict[str, str]:
    """Return the environment in which Go builds."""
    return {**os.environ, **_ENVIRONMENT}


def module(name: str) -> Path:
    """Return the folder of a module's source, which is downloaded if it is not there: `path` or `path@version`."""
    download = go("mod", "download", "-json", name)
    done = subprocess.run(download, cwd=paths.TOOLS, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(done.stdout)["Dir"])


def _kwok_stages() -> str:
    folder = module("sigs.k8s.io/kwok") / "kustomize" / "stage"
    # Pods of Jobs run until they are deleted, like all others.
    names = (
        "node/fast/node-initialize.yaml",
        "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
        "pod/fast/pod-ready.yaml",
    )
    return "---\n".join([*((folder / name).read_text() for name in names), _POD_DELETE])


if __name__ == "__main__":
    # The script that started this ends it with SIGTERM; exiting by exception ends `go build` too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (wanted,) = [scope for scope in get_args(Scope) if [scope] == sys.argv[1:]]
    build(wanted)
