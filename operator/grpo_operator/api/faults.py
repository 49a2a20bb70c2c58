"""Say for people what is wrong with a spec: which field, why, and what would be right. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from grpo_spec.schema import FUNCTION_PATH

_EPOCHS = "jobs count steps: maxSteps = epochs x rows / promptsPerStep"
_OF_OTHERS = {"numTrainEpochs": _EPOCHS, "num_train_epochs": _EPOCHS, "epochs": _EPOCHS}
"""Fields that people know from other tools, and what a job has in their place."""
UNKNOWN = "extra_forbidden"
"""Type of pydantic's error about a field that a section does not have."""


def explain(error: ValidationError, model: type[BaseModel], root: str = "spec") -> str:
    """Return one sentence for each error, such as `spec.trainer.groups[0].gpus: Input should be ... (found 0)`."""
    faults = error.errors(include_url=False)
    # pydantic counts a list without the items that are wrong.
    within = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
    shown = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in within]
    return "; ".join(_explain(fault, model, root) for fault in shown)


def path_of(location: Sequence[int | str], root: str = "spec") -> str:
    """Return a place as people write it: `spec.trainer.groups[0].gpus`."""
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{to_camel(part)}" for part in location)


def _explain(fault: ErrorDetails, model: type[BaseModel], root: str) -> str:
    path, found = path_of(fault["loc"], root), fault["input"]
    if fault["type"] == UNKNOWN:
        *above, name = fault["loc"]
        near = difflib.get_close_matches(str(name), _fields(model, above), n=1, cutoff=0.6)
        hint = _OF_OTHERS.get(str(name), f"did you mean {near[0]}?" if near else "")
        return f"{root}{path_of(above, '')}.{name}: unknown field" + (f"; {hint}" if hint else "")
    if fault["type"].startswith("recursion"):
        outer = tuple(takewhile(lambda part: part not in ("dict", "list"), fault["loc"]))  # the rest repeats itself
        return f"{path_of(outer, root)}: nested too deeply"
    if fault["type"] == "string_pattern_mismatch" and fault["ctx"]["pattern"] == FUNCTION_PATH:
        module, dot, name = str(found).rpartition(".")
        return f"{path}: write module:function" + (
            f"; did you mean {module}:{name}?" if dot and ":" not in name else ""
        )
    shown = f" (found {found!r})" if isinstance(found, str | int | float | bool) else ""
    return f"{path}: {fault['msg'].removeprefix('Value error, ')}{shown}"


def _fields(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the names of the fields of the section at this place, as people write them."""
    section: type[BaseModel] | None = model
    for part in location:
        if section is not None and isinstance(part, str):
            kinds = [field.annotation for name, field in section.model_fields.items() if part in (name, field.alias)]
            section = section_of(kinds[0]) if kinds else None
    return [] if section is None else [field.alias or name for name, field in section.model_fields.items()]


def section_of(kind: Any) -> type[BaseModel] | None:
    """Return the section that a field's type holds: `Section | None`, `tuple[Section, ...]`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for inner in get_args(kind) if (found := section_of(inner)) is not None), None)
