"""Programs of the workload that need torch, in processes of their own: the command line loads none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from grpo_cli.errors import CliError, Exit

NEEDED = ("torch", "transformers", "peft")


def check_packages(command: str) -> None:
    """Refuse a command that needs packages of the workload which are not installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise CliError(
            f"{command} needs {', '.join(missing)}: pip install 'grpo-operator[trainer]' (with vLLM for CPUs: "
            "'grpo-operator[cpu]'), or run it in the workload's image",
            Exit.INVALID,
        )


def ask(program: str, asked: Mapping[str, Any]) -> Any:
    """Return what a program of the workload answers; CliError if it fails."""
    done = subprocess.run([sys.executable, "-m", program], input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        # The text of an exception may have further lines.
        said = [line for line in lines if re.match(r"[\w.]+: ", line)] or lines
        raise CliError(f"the check ended with exit code {done.returncode}: {said[-1]}", Exit.INVALID)
    return json.loads(done.stdout)
