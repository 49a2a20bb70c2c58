"""One rank: `python -m grpo_workload.rank`, which the launcher starts with torchrun's variables.

torch, DeepSpeed and vLLM read variables during import. So this module sets them before it imports the training loop.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

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


def main() -> ExitCode:
    """Train as the environment and the contract describe. Returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(name)s: %(message)s"
    )
    contract = Contract.model_validate_json(
        Path(os.environ.get(ENV_CONTRACT, CONTRACT_PATH)).read_text(), context=WITHOUT_RULES
    )
    environment.prepare(contract.device, os.environ, is_engine_split=contract.config.generation.is_split_over_ranks)
    data_dir, state_dir = Path(os.environ.get(ENV_DATA_DIR, DATA_DIR)), Path(os.environ.get(ENV_STATE_DIR, STATE_DIR))
    write_phase(state_dir, int(os.environ["RANK"]), "Loading")

    with kept_objects():
        from grpo_workload.training.train import run_rank

    return run_rank(contract, data_dir=data_dir, state_dir=state_dir)


if __name__ == "__main__":
    sys.exit(main())
