"""Entry of `grpo check-model`: reads questions from standard input, writes what is found out to standard output.

A process of its own, since the command line loads no torch. Libraries that print do so on standard error.
"""

from __future__ import annotations

import json
import os
import sys

from grpo_spec.contract import Contract
from grpo_spec.schema import in_bytes
from grpo_workload.data.hub_silence import announce_silence
from grpo_workload.training.model_findings import answers


def main() -> None:
    """Answer one JSON object: `contracts` of one model, by name, `areExamples`, and `gpuMemory` (a size, or null).

    The answer is that of `answers`.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    announce_silence()
    asked = json.load(sys.stdin)
    contracts = {name: Contract.model_validate(fields) for name, fields in asked["contracts"].items()}
    gpu_bytes = None if asked["gpuMemory"] is None else in_bytes(asked["gpuMemory"])
    json.dump(answers(contracts, gpu_bytes, are_examples=asked["areExamples"]), output)
    output.close()


if __name__ == "__main__":
    main()
