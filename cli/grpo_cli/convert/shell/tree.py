"""The syntax tree of a script, made by shfmt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

Node = dict[str, Any]
_TIMEOUT_SECONDS = 30


class RefusedError(ValueError):
    """A script that cannot be read; the text names the line."""


def parse(source: bytes) -> Node:
    """Return shfmt's tree of a bash script. Raises RefusedError where that finds a fault, or is not installed."""
    if (shfmt := _shfmt()) is None:
        raise RefusedError("scripts are read with shfmt, which is missing here: pip install 'grpo-operator[cli]'")
    command = [shfmt, "-ln", "bash", "--to-json"]
    try:
        done = subprocess.run(command, input=source, capture_output=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"shfmt could not be run: {error}") from error
    if done.returncode:
        fault = (done.stderr.decode(errors="replace").strip().splitlines() or ["shfmt failed"])[0]
        raise RefusedError(re.sub(r"^.*?(\d+):\d+: ", r"line \1: ", fault))
    tree: Node = json.loads(done.stdout)
    return tree


def _shfmt() -> str | None:
    """The program: beside Python, where pip put it, or on the PATH."""
    beside = shutil.which("shfmt", path=str(Path(sys.executable).parent))
    try:
        files = distribution("shfmt-py").files or []
    except PackageNotFoundError:
        files = []
    installed = (str(file.locate()) for file in files if file.stem == "shfmt" and os.access(file.locate(), os.X_OK))
    return beside or next(installed, None) or shutil.which("shfmt")
