"""Programs of the workload that need torch, in processes of their own: the command line loads none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from grpo_cli.errors import CliError, Exit

POLL_SECONDS = 2
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
    """Return what a program of the workload answers; CliError if it fails. While it waits for a hub that does not
    answer, its line about that goes to standard error.
    """
    with tempfile.TemporaryFile() as question:  # a pipe's rest would never be sent once `communicate` has timed out
        question.write(json.dumps(asked).encode())
        question.seek(0)
        command = [sys.executable, "-m", program]
        with subprocess.Popen(command, stdin=question, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            output, errors = _communicate(process)
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        # The text of an exception may have further lines.
        said = [line for line in lines if re.match(r"[\w.]+: ", line)] or lines
        raise CliError(f"the check ended with exit code {process.returncode}: {said[-1]}", Exit.INVALID)
    return json.loads(output)


def _communicate(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Return what a process writes to standard output and standard error until it ends; say that it waits for a hub."""
    from grpo_spec.reports import WAITS_FOR_HUB

    told = False
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired as waits:
            said = (waits.stderr or b"").decode(errors="replace")
        except BaseException:
            process.kill()
            raise
        if not told and (found := re.search(f"^{WAITS_FOR_HUB}.+$", said, re.MULTILINE)):
            print(found[0], file=sys.stderr)
            told = True
