"""The defaults with which a job began. Pure.

The API server stores what the user wrote (user_schema.py). Which default an unset field has is the release's choice,
and another release may choose otherwise. So the status keeps those that a job uses, in the shape of the spec, from its
first attempt on; items of a list share one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_operator.api.faults import section_of
from grpo_operator.api.pod_template import PodTemplate
from grpo_spec.schema import dump

Defaults = dict[str, Any]


def used_defaults(section: BaseModel) -> Defaults:
    """Return the value of each field that a section, and the sections in it, do not set, if it has one.

    Of pod settings none: a group's are merged over the job's by what each of them sets.
    """
    found, values = Defaults(), dump(section)
    for name, key, _ in _fields(type(section)):
        value = getattr(section, name)
        inner = [value] if isinstance(value, BaseModel) else value if isinstance(value, tuple) else ()
        if sections := [one for one in inner if isinstance(one, BaseModel)]:
            for one in sections:
                found[key] = together(found.get(key), used_defaults(one))
        elif name not in section.model_fields_set and value not in (None, (), {}):
            found[key] = values[key]
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
    for name, key, field in _fields(model):
        inner = section_of(field.annotation)
        if inner is None and key not in raw and name not in raw:
            if key in kept:
                full[key] = kept[key]
            elif field.default is not None and NoneType in get_args(field.annotation):
                full[key] = None
        elif inner is not None and key in kept:
            if isinstance(given := raw.get(key), list):
                full[key] = [with_defaults(inner, one, kept[key]) for one in given]
            elif key in raw or field.default_factory is not None:
                full[key] = with_defaults(inner, raw.get(key, {}), kept[key])
    return full


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield the fields of a section with their names in Python and in JSON, without pod settings."""
    for name, field in model.model_fields.items():
        if section_of(field.annotation) is not PodTemplate:
            yield name, field.alias or name, field
