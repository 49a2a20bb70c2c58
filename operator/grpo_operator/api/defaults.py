"""The defaults with which a job began. Pure.

The API server stores what the user wrote (user_schema.py). Which default an unset field has is the release's choice,
and another release may choose otherwise. So the status keeps those that a job uses, in the shape of the spec, from its
first attempt on; items of a list share one entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from grpo_operator.api.faults import section_of
from grpo_operator.api.pod_template import PodTemplate

Defaults = dict[str, Any]


def used_defaults(section: BaseModel) -> Defaults:
    """Return the value of each field that a section, and the sections in it, do not set, if it has one.

    Of pod settings none: a group's are merged over the job's by what each of them sets.
    """
    found = Defaults()
    for field in _fields(type(section)):
        key, value = field.key, getattr(section, field.name)
        inner = [value] if isinstance(value, BaseModel) else value if isinstance(value, tuple) else ()
        if sections := [one for one in inner if isinstance(one, BaseModel)]:
            for one in sections:
                found[key] = together(found.get(key), used_defaults(one))
        elif field.name not in section.model_fields_set and value not in (None, (), {}):
            found[key] = to_jsonable_python(value)
    return found


def together(kept: Any, new: Defaults) -> Defaults:
    """Return the defaults that are kept, and the new ones of what has none yet."""
    if not isinstance(kept, Mapping):
        return new
    both = {
        key: together(kept[key], new[key]) if isinstance(new[key], dict) else kept[key] for key in kept if key in new
    }
    return {**new, **kept, **both}


def with_defaults(model: type[BaseModel], raw: Any, kept: Any) -> Any:
    """Return a stored section with the defaults that are kept for what it does not set.

    Whatever was without a default stays unset, if it may be: also where it has one now.
    """
    if not isinstance(raw, Mapping) or not isinstance(kept, Mapping):
        return raw
    full = dict(raw)
    for field in _fields(model):
        key, inner = field.key, field.inner
        if inner is None and key not in raw and field.name not in raw:
            if key in kept:
                full[key] = kept[key]
            elif field.was_free:
                full[key] = None
        elif inner is not None and key in kept:
            if isinstance(given := raw.get(key), list):
                full[key] = [with_defaults(inner, one, kept[key]) for one in given]
            elif key in raw or field.is_there:
                full[key] = with_defaults(inner, raw.get(key, {}), kept[key])
    return full


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a section, as far as defaults need it."""

    name: str
    key: str  # its name in JSON
    inner: type[BaseModel] | None  # the section that it holds, or a list of
    is_there: bool  # a section that is there unless it is set
    was_free: bool  # it may be unset, and has a default now


@cache
def _fields(model: type[BaseModel]) -> tuple[_Field, ...]:
    """Return the fields of a section without pod settings."""
    return tuple(
        _Field(
            name=name,
            key=field.alias or name,
            inner=inner,
            is_there=field.default_factory is not None,
            was_free=field.default is not None and NoneType in get_args(field.annotation),
        )
        for name, field in model.model_fields.items()
        if (inner := section_of(field.annotation)) is not PodTemplate
    )
