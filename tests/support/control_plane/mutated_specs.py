"""Specs of jobs with mistakes that people and programs make, to compare who accepts them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic.alias_generators import to_snake

Choose = Callable[[Sequence[Any]], Any]
"""Picks one item: `random.Random(0).choice`, or a draw of Hypothesis."""

VALUES = (
    *(None, True, False, 0, 1, 2, -1, 1.0, 0.5, 1e-6, 1e30, 2**63, 10**40),
    *("", "1", "true", "x", "none", "X y", "4Gi", "x" * 5000),
    *([], [None], ["x"], [1], ["x", "x"], [{}], {}, {"x": 1}, {"x": "y"}, {"x": None}, {"name": "x"}),
)


def mutated(spec: Mapping[str, Any], schema: Mapping[str, Any], choose: Choose) -> dict[str, Any]:
    """Return a copy of a spec in which up to three places are wrong, odd or fine.

    `schema` is the CRD's for specs: fields that the spec has not can be set, too.
    """
    found = copy.deepcopy(dict(spec))
    for _ in range(choose((1, 1, 1, 2, 3))):
        holder, key, section = choose(list(_places(found, schema)))
        match choose(("set", "set", "set", "remove", "rename", "unknown", "twice")):
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[choose((to_snake(key), key.lower(), f"{key}s"))] = holder.pop(key)
            case "unknown" if isinstance(holder[key], dict):
                holder[key][choose(("unknown", "x", ""))] = copy.deepcopy(choose(VALUES))
            case "twice" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case _:
                fields = section.get("properties")
                if fields and isinstance(holder[key], dict):  # one of its fields, be it there or not
                    field = choose(sorted(fields))
                    holder[key][field] = copy.deepcopy(choose((*VALUES, *fields[field].get("enum", ()))))
                else:
                    holder[key] = copy.deepcopy(choose(VALUES))
    return found


def _places(value: Any, schema: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
    """Yield every place below a value: what holds it, its key there, and its schema."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        below = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or schema.get("items") or {}
        yield value, key, below
        yield from _places(value[key], below)
