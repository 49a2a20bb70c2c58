"""The object by which a site sets something, as a layer of jobs, and what is wrong with it (site.py). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from grpo_operator.api.faults import explain
from grpo_operator.api.site import BLOCKS, PRICE, PRICE_FORM, QUEUE, REQUIRED, SECTIONS
from grpo_operator.api.spec import GRPOJobSpec
from grpo_spec.lenient import mapping
from grpo_spec.schema import WITHOUT_RULES


def layer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer that an object is. `fault` says what is wrong with it: no job may begin with it."""
    spec = mapping(raw.get("spec"))
    fault = find_fault(spec)
    given = {block: spec[block] for block in BLOCKS if spec.get(block)}
    return {"generation": raw["metadata"].get("generation", 0), **given, **({"fault": fault} if fault else {})}


def find_fault(spec: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the spec of a GRPOClusterDefaults or GRPODefaults, by field, or None.

    Rules between fields are left out: they hold, or not, for a job with all its values.
    """
    wrong = [f"spec.{name}: unknown field; there are {' and '.join(BLOCKS)}" for name in spec if name not in BLOCKS]
    wrong += [fault for block in BLOCKS for fault in _faults_of(spec.get(block, {}), f"spec.{block}")]
    return "; ".join(wrong) or None


def _faults_of(block: object, root: str) -> Iterator[str]:
    if not isinstance(block, Mapping):
        yield f"{root}: must be a part of a GRPOJob's spec"
        return
    can = (QUEUE, PRICE, *SECTIONS)
    yield from (f"{root}.{name}: cannot be set here; what can: {', '.join(can)}" for name in block if name not in can)
    if not isinstance(queue := block.get(QUEUE, "none"), str) or not queue:
        yield f"{root}.{QUEUE}: must be the name of a LocalQueue"
    if not re.fullmatch(PRICE_FORM, str(block.get(PRICE, "0 EUR"))):
        yield f"{root}.{PRICE}: must be an amount and a currency, such as 2.50 EUR"
    parts = {name: block[name] for name in SECTIONS if name in block}
    try:
        GRPOJobSpec.model_validate({**REQUIRED, **parts}, context=WITHOUT_RULES, by_alias=True, by_name=False)
    except ValidationError as error:
        yield explain(error, GRPOJobSpec, root)
