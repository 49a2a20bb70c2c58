"""The process of a download pod: `python -m grpo_workload.download_pod '{"model": "Qwen/Qwen3-8B"}'`."""

import logging
import sys

from grpo_spec.contract import Downloads
from grpo_workload.data.download import main

logger = logging.getLogger(__name__)


def check(wanted: Downloads) -> None:
    """Plan the job if its GPUs are known. Raises CannotFitError; what cannot be planned is downloaded."""
    if wanted.contract is None or wanted.gpu_bytes is None:
        return
    try:  # torch takes seconds to load, and a gigabyte of memory
        from grpo_workload.capacity.proposals import CannotFitError, check_fit
        from grpo_workload.capacity.shapes import Models

        check_fit(wanted.contract, wanted.gpu_bytes, Models())
    except Exception as error:
        if isinstance(error, CannotFitError):
            raise
        logger.warning("whether the job fits is not known before its GPUs: %s: %s", type(error).__name__, error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], check))
