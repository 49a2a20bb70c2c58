"""Objects that the chart renders, by helm itself."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import binaries
from support.paths import ROOT

CHART = ROOT / "charts" / "grpo-operator"


class Yaml12(yaml.SafeLoader):
    """Reads numbers as Kubernetes does: PyYAML reads helm's 1e-06 as a string."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def helm() -> Path:
    """Return the program; a test that wants it where it is not built is skipped."""
    try:
        return binaries.binary("helm")
    except FileNotFoundError:
        pytest.skip("helm is not built: make binaries")


def _name(o: dict[str, Any]) -> str:
    end = o["metadata"]["name"].rpartition("-")[2]
    if o["kind"] == "CustomResourceDefinition":
        return f"{o['kind']} {o['spec']['names']['kind']}"
    if o["kind"] == "ClusterRole" and end in ("view", "edit", "admin"):
        return f"ClusterRole {end}"
    if end == "leader":
        return f"{o['kind']} leader"
    return f"{o['kind']} {o['metadata'].get('namespace', '')}".strip() if "Role" in o["kind"] else str(o["kind"])


def render(*args: str, release: str = "grpo-operator", namespace: str = "grpo-system") -> dict[str, dict[str, Any]]:
    """Return the rendered objects without those of `helm test`. Raises ValueError if helm refuses the values.

    Keys: the kind; for roles the kind and the namespace; for aggregated roles, and those of the Lease, the kind and the
    end of the name; for CRDs the kind and what they define.
    """
    command = [str(helm()), "template", release, str(CHART), "--skip-tests", "--namespace", namespace, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    objects = [o for o in yaml.load_all(done.stdout, Yaml12) if o]
    named = {_name(o): o for o in objects}
    assert len(named) == len(objects)
    return named
