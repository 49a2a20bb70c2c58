"""Whether a job fits, and up to three edits that make it fit, the fastest first."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.schema import dump
from grpo_spec.trainer import TrainerConfig
from grpo_workload.capacity.edits import CHANGES_RESULT, Edit, candidates, edited, keeps_layout
from grpo_workload.capacity.order import step_seconds
from grpo_workload.capacity.plan import Place, Plan, plan
from grpo_workload.capacity.shapes import Models
from grpo_workload.capacity.states import GIB
from grpo_workload.pod.model_split import check_split

PROPOSALS = 3

logger = logging.getLogger(__name__)


class Proposal(NamedTuple):
    """An edit of a job that fits with it."""

    edit: Edit
    plan: Plan
    seconds: float  # of a step, in the model of `order`


def proposals(jobs: Iterable[tuple[Edit, Contract]], planned: Callable[..., Plan], models: Models) -> list[Proposal]:
    """Return the best edits of `jobs`, one for each field: the fastest, after all those that change no result.

    Args:
        jobs: edits, with the contract that each makes.
        planned: returns the plan of a contract, by these or other models.
        models: those of earlier plans.
    """
    best: dict[str, Proposal] = {}
    bound = models.without_passes()
    for edit, contract in jobs:
        try:
            shapes = models.shapes(contract.config)
            sizes = {one.tensor_parallel for one in contract.engines} or {contract.config.generation.tensor_parallel}
            for size in sizes:
                check_split(edit[0], size, shapes.fields)
            if not planned(contract, bound).is_safe or not (found := planned(contract, models)).is_safe:
                continue
        except ConfigError:  # the model does not allow it
            continue
        made = Proposal(edit, found, step_seconds(contract, found, shapes))
        if edit[0] not in best or made.seconds < best[edit[0]].seconds:
            best[edit[0]] = made
    return sorted(best.values(), key=lambda one: (one.edit[0] in CHANGES_RESULT, one.seconds))[:PROPOSALS]


def own_edits(contract: Contract) -> Iterable[tuple[Edit, Contract]]:
    """Yield the edits of a contract that leave all ranks and engines where they are, with the contract edited."""
    fields = dump(contract.config)
    for edit in candidates(contract):
        if not keeps_layout(edit, contract):
            continue
        try:
            config = TrainerConfig.model_validate(edited(fields, edit))
        except ValueError:  # the spec refuses it
            continue
        yield edit, contract.model_copy(update={"config": config})


class CannotFitError(ConfigError):
    """A job does not fit whatever its sequences are."""


def check_fit(contract: Contract, gpu_bytes: int, models: Models) -> Plan:
    """Return the plan of a job's trainer pods; warn if it lacks memory, unless that is beyond doubt.

    Edits that would fit are looked for before a refusal alone: each takes passes of the model, and a job that is warned
    of begins. Beyond doubt is what lacks more than a plan may be wrong by even without activations: how long sequences
    are is a guess here, and ranks try the longest before their first step.

    Raises:
        CannotFitError: they cannot fit; with the bytes, and edits that would.
        ConfigError: the model's configuration cannot be used.
    """

    def planned(one: Contract, known: Models) -> Plan:
        return plan(one, gpu_bytes, known)

    made = planned(contract, models)
    if made.fits:
        return made
    lacks = f"generation, parallelism: {describe(made.tightest)}"
    if not any(place.is_hopeless for place in planned(contract, models.without_passes()).gpus):
        logger.warning(
            "%s. It begins nevertheless: this is a forecast (grpo plan shows all parts, and what would fit)", lacks
        )
        return made
    found = proposals(own_edits(contract), planned, models)
    cures = "; ".join(f"{one.edit[0]}: {json.dumps(one.edit[1])}" for one in found)
    cure = f"One of these would fit: {cures}" if found else "No single field would make it fit; more GPUs may"
    raise CannotFitError(f"{lacks}. {cure} (grpo plan shows all parts)")


def describe(place: Place) -> str:
    """Say in a sentence what a place lacks."""
    if place.engine_over:
        parts = place.phases["generate"]
        return (
            f"vLLM's share of the GPU of {place.name} lacks {_gib(place.engine_over)} for its weights "
            f"({_gib(parts['engine weights'])}) and a KV cache of one sequence ({_gib(parts['KV cache'])})"
        )
    parts = {name: size for name, size in place.phases[place.worst].items() if size >= GIB // 20}
    listed = ", ".join(f"{_gib(size)} of {name}" for name, size in sorted(parts.items(), key=lambda one: -one[1]))
    return (
        f"{place.name} needs {_gib(place.peak)} in the phase {place.worst}, {_gib(place.over)} more than "
        f"its {_gib(place.limit or 0)}: {listed}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
