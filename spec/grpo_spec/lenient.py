"""Read JSON that another release, another program or a hostile pod wrote: use what can be used, leave the rest out.

For what programs report. What people write is parsed strictly, by the models themselves. Torch-free: the operator
imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from grpo_spec.schema import WITHOUT_RULES

M = TypeVar("M", bound=BaseModel)

MAX_INTEGER = 2**63 - 1
"""Largest integer that the API server stores."""

_DEPTH = 64
"""Deeper parts of a value are left out; no object of Kubernetes or of ours is as deep."""

_ROUNDS = 32
"""Most rounds of mending: leaving a value out may make its parent incomplete, and so on up to the root."""

_OUT = object()


def read(model: type[M], raw: object, required: Mapping[str, object] | None = None) -> M:
    """Read a value of any shape as a model.

    Unknown fields and nulls are ignored, texts, lists and numbers that are too long or too large are cut to the
    model's bounds, and what is wrong otherwise is left out, with the list item that needs it. A number that is too
    small is left out too: raised to its bound, a deadline of 0 would end a job at once. Rules between fields are
    not checked. `required` has values for fields of the root that have no default. Raises ValueError if one is missing.
    """
    value: Any = raw
    for _ in range(_ROUNDS):
        try:
            return model.model_validate(value, context=WITHOUT_RULES)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            value = _mended(value if isinstance(value, Mapping) else {}, faults, required or {})
    raise ValueError(f"{model.__name__} cannot be read: {faults[0]['msg']} at {faults[0]['loc']}")


def without(raw: object, faults: Sequence[ErrorDetails]) -> Any:
    """Return a copy of a value without the parts that these errors are about."""
    value = _copy(raw)
    for fault in faults:
        holder, key, _ = _find(value, fault["loc"])
        if holder is not None:
            holder[key] = _OUT
    return _swept(value)


def plain(value: object) -> Any:
    """Return a copy of JSON without nulls and numbers that are none; integers are cut to 64 bits."""
    return _swept(_plain(_copy(value)))


def clip(whole: str, limit: int) -> str:
    """Return a text cut to `limit` bytes of UTF-8, with a mark where it was cut."""
    data = whole.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    mark = " [...]" if limit > 16 else ""
    return data[: limit - len(mark)].decode(errors="ignore") + mark


def mapping(value: object) -> Mapping[str, Any]:
    """Return an object of JSON; an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the objects of a list of JSON; none in place of anything else."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def text(value: object) -> str:
    """Return a text of JSON; an empty one in place of anything else."""
    return value if isinstance(value, str) else ""


def number(value: object, otherwise: int) -> int:
    """Return an integer of JSON, or another one in place of anything else."""
    return value if isinstance(value, int) else otherwise


def _mended(raw: object, faults: Sequence[ErrorDetails], required: Mapping[str, object]) -> Any:
    value = _copy(raw)
    for fault in faults:
        holder, key, rest = _find(value, fault["loc"])
        if holder is None:
            name = str(fault["loc"][0]) if fault["loc"] else ""
            if name in required:
                value[name] = _copy(required[name])
        elif holder[key] is not _OUT:
            holder[key] = _OUT if rest else _cut(holder[key], fault)
    return _swept(value)


def _cut(value: Any, fault: ErrorDetails) -> Any:
    limits = fault.get("ctx", {})
    match fault["type"], value:
        case "string_too_long", str():
            return value[: limits["max_length"]]
        case "too_long", list():
            return value[: limits["max_length"]]
        case "too_long", dict():
            return dict(islice(value.items(), limits["max_length"]))
        case "less_than_equal", _:
            return limits["le"]
    return _OUT


def _find(value: Any, path: Sequence[int | str]) -> tuple[Any, Any, Sequence[int | str]]:
    """Return the container and the key of the deepest value on the path that exists, and the rest of the path.

    The container is None if not even the path's first part exists.
    """
    holder, key = None, None
    for depth, part in enumerate(path):
        keys: Sequence[Any] = ()
        if isinstance(value, dict):  # errors name a field in camelCase, also where it was written in snake_case
            keys = [part] if part in value else [name for name in value if to_camel(name) == part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            keys = [part]
        if not keys:
            return holder, key, path[depth:]
        holder, key, value = value, keys[0], value[keys[0]]
    return holder, key, ()


def _copy(value: Any, *, depth: int = 0) -> Any:
    """Return a copy of what is no deeper than any field of a model."""
    if depth > _DEPTH:
        return _OUT
    if isinstance(value, Mapping):
        return {str(key): _copy(one, depth=depth + 1) for key, one in value.items()}
    return [_copy(one, depth=depth + 1) for one in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _OUT
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-MAX_INTEGER, min(MAX_INTEGER, value))
    return value


def _swept(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _swept(one) for key, one in value.items() if one is not _OUT}
    if isinstance(value, list):
        return [_swept(one) for one in value if one is not _OUT]
    return None if value is _OUT else value
