"""The question of `grpo plan`, which the page of `grpo ui` asks too. A process with torch counts the bytes."""

from __future__ import annotations

from typing import Any

from grpo_cli.local.edited import contract_of, edits, pod_sizes
from grpo_cli.local.programs import ask, check_packages
from grpo_operator.layout.job import Job
from grpo_spec.schema import dump

PROGRAM = "grpo_workload.plan"


def question(job: Job, gpu: int | None, engine_gpu: int | None = None) -> dict[str, Any] | None:
    """Return what the planner is asked about a job, whose pods have GPUs of `gpu` bytes, engine pods of `engine_gpu`.

    None where the GPU is known neither from `gpu` nor from the pods' node selectors.
    """
    limits, selected = pod_sizes(job)
    contract = contract_of(job)
    trainers = [selected.get(member.group) for member in contract.members]
    gpu = gpu or (None if None in trainers else min(size for size in trainers if size is not None))
    if gpu is None:
        return None
    engines = [selected.get(engine.group) or gpu for engine in contract.engines]
    return {
        "contract": dump(contract),
        "gpuBytes": gpu,
        "engineBytes": engine_gpu or min(engines, default=gpu),
        "hostBytes": limits,
        "edits": [[edit, dump(made)] for edit, made in edits(job, dump(job.spec))],
    }


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that answers a `question`; takes seconds. Raises CliError."""
    check_packages("plan")
    found: dict[str, Any] = ask(PROGRAM, asked)
    return found
