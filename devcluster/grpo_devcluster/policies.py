"""The admission policy that mounts this machine's programs into workload pods."""

import json
import os
import string
import subprocess
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster import kube, paths
from grpo_devcluster.progress import wait_until

JOB_LABEL = "training.grpo.dev/job"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives")


def interpreter_folders(venv: Path) -> list[Path]:
    """Return the folders of the environment's interpreter; links may reach one folder by two names."""
    python = venv / "bin" / "python"
    asked = subprocess.run(
        [str(python), "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    )
    prefix = Path(asked.stdout.strip())
    folders = [prefix, prefix.resolve()]
    link = python
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / os.readlink(link)))
        folders.append(link.parent.parent)
    return folders


def mount_paths(venv: Path, repo: Path, hf_cache: Path) -> list[Path]:
    """Return the folders to mount, only the outermost: below a read-only mount no mount point can be created."""
    interpreter = interpreter_folders(venv) if (venv / "bin" / "python").exists() else []
    wanted = [*(Path(p) for p in _SYSTEM), venv, *interpreter, repo / "spec", repo / "workload", hf_cache]
    existing = sorted({p for p in wanted if p.is_dir()}, key=lambda p: (len(p.parts), str(p)))
    outermost: list[Path] = []
    for path in existing:
        if not any(path.is_relative_to(other) for other in outermost):
            outermost.append(path)
    return outermost


def environment(venv: Path, hf_cache: Path) -> dict[str, str]:
    """Return variables by which the mounted programs are found, stay offline, write only to /tmp, and share cores."""
    return {
        "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        # Not HF_HOME, which is the job's cache volume.
        "HF_HUB_CACHE": str(hf_cache / "hub"),
        "HF_HUB_OFFLINE": "1",
        # The shared cache is read-only; files that a library derives from it go to the pod's /tmp.
        "HF_DATASETS_CACHE": "/tmp/huggingface/datasets",
        "HF_MODULES_CACHE": "/tmp/huggingface/modules",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def render(mounts: list[Path], variables: dict[str, str]) -> list[dict[str, Any]]:
    """Return the policy and its binding; CEL writes lists and maps as JSON does."""
    template = string.Template((paths.MANIFESTS / "host-mounts.yaml").read_text())
    named = [{"name": f"devcluster-host-{i}", "path": str(path)} for i, path in enumerate(mounts)]
    settings = [{"name": name, "value": value} for name, value in variables.items()]
    text = template.substitute(mounts=_cel(named), environment=_cel(settings))
    return [document for document in yaml.safe_load_all(text) if document]


def _cel(value: object) -> str:
    # A single quote would end the YAML string around it.
    return json.dumps(value).replace("'", "''")


def create(kubeconfig: Path) -> None:
    """Apply the policy and wait until the API server enforces it, which takes a few seconds."""
    venv, hf_cache = paths.venv_dir(), paths.hf_cache()
    hf_cache.mkdir(parents=True, exist_ok=True)
    mounts = mount_paths(venv, paths.REPO, hf_cache)
    kube.apply(kubeconfig, render(mounts, environment(venv, hf_cache)))
    wait_until(lambda: _in_force(kubeconfig, mounts), "host mounts policy in force", timeout=60)


def _in_force(kubeconfig: Path, mounts: list[Path]) -> bool:
    spec = {"containers": [{"name": "probe", "image": "probe"}], "automountServiceAccountToken": False}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "labels": {JOB_LABEL: "probe"}},
        "spec": spec,
    }
    answer = kube.core(kubeconfig).create_namespaced_pod("default", pod, dry_run="All")
    # Compares contents, because right after a change the API server still applies the earlier policy.
    return [v.host_path.path for v in answer.spec.volumes or [] if v.host_path] == [str(m) for m in mounts]
