"""One pod of a job as a process of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from grpo_spec import contract as c
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome


def state_folder(output: Path, pod: str) -> Path:
    """Return the folder of a pod's own files."""
    return output / "pods" / pod


def launch(
    module: str, pod: str, contract: Path, output: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the program of a pod, which reads its contract from a file."""
    state = state_folder(output, pod)
    state.mkdir(parents=True, exist_ok=True)
    (state / "termination-log").unlink(missing_ok=True)  # of an attempt before, which would speak for this one
    environment = os.environ | variables
    environment |= {
        c.ENV_POD_NAME: pod,
        c.ENV_POD_UID: pod,
        c.ENV_CONTRACT: str(contract),
        c.ENV_STATE_DIR: str(state),
        c.ENV_DATA_DIR: str(output / "data"),
        c.ENV_TERMINATION_LOG: str(state / "termination-log"),
    }
    with (state / "launcher.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=log, stderr=log)


def outcome_of(output: Path, pod: str, returncode: int) -> Outcome:
    """Return how a pod has ended: as it says itself, or that it could not say it."""
    state = state_folder(output, pod)
    message = state / "termination-log"
    if message.exists() and (said := message.read_text(errors="replace")):  # empty: it had begun, and was killed
        with suppress(ValueError):  # killed while it wrote that
            return Outcome.model_validate_json(said)
    text = f"the launcher of {pod} ended with {returncode} and no result: see {state / 'launcher.log'}"
    return Outcome(attempt=0, exit_code=ExitCode.RANK_FAILED, reason=Reason.LAUNCHER_DIED, message=text)
