"""One rank: `python -m grpo_workload.rank`, which the launcher starts with torchrun's variables.

torch, DeepSpeed and vLLM read variables during import. So this module sets them before it imports the training loop.
A rank that is started ahead of its attempt (`launcher.start_ranks`) imports it too, and waits before it takes a GPU.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from grpo_spec.contract import (
    CONTRACT_PATH,
    DATA_DIR,
    ENV_CONTRACT,
    ENV_DATA_DIR,
    ENV_STATE_DIR,
    STATE_DIR,
    Contract,
)
from grpo_spec.reports import ExitCode
from grpo_spec.schema import WITHOUT_RULES
from grpo_workload.ranks import environment
from grpo_workload.ranks.kept_objects import kept_objects
from grpo_workload.reporting.progress_files import write_phase
from grpo_workload.reporting.start_log import process_start


def main() -> ExitCode:
    """Train as the environment and the contract describe. Returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(name)s: %(message)s"
    )
    contract, begins, began = _read_contract(), _take_stdin(), process_start()
    environment.prepare(contract.device, os.environ, is_engine_split=contract.config.generation.is_split_over_ranks)
    data_dir, state_dir = Path(os.environ.get(ENV_DATA_DIR, DATA_DIR)), Path(os.environ.get(ENV_STATE_DIR, STATE_DIR))
    if begins is None:
        write_phase(state_dir, int(os.environ["RANK"]), "Loading")

    with kept_objects():
        from grpo_workload.training.train import run_rank

    if begins is not None:
        if not (at := begins.readline()):  # the launcher has ended
            return ExitCode.STOPPED
        contract, began = _read_contract(), float(at)
        write_phase(state_dir, int(os.environ["RANK"]), "Loading")
    return run_rank(contract, data_dir=data_dir, state_dir=state_dir, began=began)


def _take_stdin() -> TextIO | None:
    """Return what the launcher writes to a rank that waits, out of reach of programs that imports start; else None."""
    if os.environ.pop(environment.ENV_WAITS, None) is None:
        return None
    begins = os.fdopen(os.dup(sys.stdin.fileno()))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return begins


def _read_contract() -> Contract:
    path = Path(os.environ.get(ENV_CONTRACT, CONTRACT_PATH))
    return Contract.model_validate_json(path.read_text(), context=WITHOUT_RULES)


if __name__ == "__main__":
    sys.exit(main())
