"""Entry of `grpo plan`: reads a job from standard input, writes whether it fits to standard output.

A process of its own, since the command line loads no torch. Libraries that print do so on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from grpo_spec.contract import Contract
from grpo_workload.capacity.order import step_seconds
from grpo_workload.capacity.plan import Plan, plan
from grpo_workload.capacity.proposals import describe, proposals
from grpo_workload.capacity.shapes import Models
from grpo_workload.capacity.tensor_parallel import ratio
from grpo_workload.data.hub_silence import announce_silence


def main() -> None:
    """Answer one JSON object.

    It has `contract`, `gpuBytes`, `engineBytes`, `hostBytes` (see `plan`), and `edits`: pairs of an edit and the
    contract that it makes. The answer has the plan of the contract and, unless it is safe, the best edits.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    announce_silence()
    json.dump(answer(json.load(sys.stdin)), output)
    output.close()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one question."""
    contract, models = Contract.model_validate(asked["contract"]), Models()

    def planned(one: Contract, known: Models) -> Plan:
        sizes = {"engine_bytes": asked["engineBytes"], "host_bytes": asked["hostBytes"]}
        return plan(one, asked["gpuBytes"], known, **sizes)

    made = planned(contract, models)
    split = ratio(contract, models)
    found = []
    if not made.is_safe:
        edits = [(tuple(edit), Contract.model_validate(fields)) for edit, fields in asked["edits"]]
        found = proposals(edits, planned, models)
    return _fields(made) | {
        "seconds": step_seconds(contract, made, models.shapes(contract.config)),
        "ratio": None if split is None else str(split),
        "proposals": [
            {"field": one.edit[0], "value": one.edit[1], "seconds": one.seconds} | _fields(one.plan) for one in found
        ],
    }


def _fields(made: Plan) -> dict[str, Any]:
    return {
        "fits": made.fits,
        "isSafe": made.is_safe,
        "why": None if made.fits else describe(made.tightest),
        "tokens": made.tokens,
        "chosenTokens": made.chosen_tokens,
        "unknown": made.unknown,
        "places": [
            {"name": one.name, "isHost": one.is_host, "phases": one.phases, "limit": one.limit} for one in made.places
        ],
    }


if __name__ == "__main__":
    main()
