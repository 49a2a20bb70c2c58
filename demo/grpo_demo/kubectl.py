"""kubectl and helm, by which the demo uses the cluster as a person would."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_demo.console import DemoError, run, show
from grpo_devcluster import binaries

_SKIPPED = ("Volumes:", "Mounts:", "Spec:")


def condensed(lines: Iterable[str]) -> Iterator[str]:
    """Drop the spec, which the reader wrote, and the volumes, of which a devcluster's pod has dozens."""
    skipped: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if skipped is not None and indent > skipped:
            continue
        skipped = indent if line.strip() in _SKIPPED else None
        if skipped is None:
            yield line


@dataclass(frozen=True)
class Kubectl:
    """kubectl on one cluster and namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def show(self, *args: str) -> None:
        """Run kubectl and print its output. Raises DemoError when it fails."""
        run([binaries.binary("kubectl"), "--namespace", self.namespace, *args], env=self._environment())

    def text(self, *args: str) -> str:
        """Run kubectl and return its output. Raises DemoError when it fails."""
        command = [str(binaries.binary("kubectl")), "--namespace", self.namespace, *args]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return one object."""
        found = json.loads(self.text("get", kind, name, "-o", "json"))
        assert isinstance(found, dict)
        return found

    def helm(self, *args: str | Path) -> None:
        """Run helm and print its output. Raises DemoError when it fails."""
        run([binaries.binary("helm"), *args], env=self._environment())

    def diagnose(self, job: str) -> None:
        """Print what explains a job in trouble; an error of kubectl is printed in place of its output."""
        selector = f"training.grpo.dev/job={job}"
        system = ["--namespace", "grpo-system"]
        for args in (
            ["get", "grpojobs,statefulsets,pods", "-o", "wide"],
            ["describe", "grpojob", job],
            ["describe", "pods", "-l", selector],
            ["logs", "-l", selector, "--all-containers", "--prefix", "--tail=30"],
            [*system, "get", "pods", "-o", "wide"],
            [*system, "logs", "-l", "app.kubernetes.io/name=grpo-operator", "--tail=30"],
        ):
            show(f"--- kubectl {' '.join(args)}")
            try:
                lines = self.text(*args).splitlines()
            except DemoError as error:
                lines = [str(error)]
            for line in condensed(lines):
                show(line)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
