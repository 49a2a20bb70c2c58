"""Reads what people write with the verdict of the API server: types are those of JSON, names are camelCase. Pure."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from grpo_spec import lenient

M = TypeVar("M", bound=BaseModel)


def read_strictly(model: type[M], raw: Any) -> tuple[M, Any]:
    """Read a value of JSON as a model; return it, and the value without the fields that are null.

    Such a field is as one that is not written, even if there is none of its name. A null in a list is refused, one in a
    field of any shape is kept.

    Raises:
        ValidationError: its places are those of the value.
    """
    while True:
        try:
            read = model.model_validate_json(json.dumps(raw), strict=True, by_alias=True, by_name=False)
            return read, _swept(raw, read)
        except ValidationError as error:
            nulls = [fault for fault in error.errors(include_url=False) if _is_null_field(fault)]
            if not nulls:
                raise
        raw = lenient.without(raw, nulls)


def _is_null_field(fault: ErrorDetails) -> bool:
    place = fault["loc"]
    return fault["input"] is None and bool(place) and isinstance(place[-1], str)


def _swept(raw: Any, read: Any) -> Any:
    if isinstance(read, BaseModel) and isinstance(raw, dict):
        names = {field.alias or name: name for name, field in type(read).model_fields.items()}
        return {key: _swept(one, getattr(read, names[key])) for key, one in raw.items() if one is not None}
    if isinstance(read, list | tuple) and isinstance(raw, list):
        return [_swept(one, other) for one, other in zip(raw, read, strict=True)]
    return raw
