"""Values as YAML, a shell or hydra writes them -> values of a job's spec. Pure; a ValueError says what is wrong."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class LeftError(ValueError):
    """A value that has no place in a job; its text says why, and what to do."""


_TRUE, _FALSE = {"true", "yes", "1", "on"}, {"false", "no", "0", "off"}
_NONE = {"", "none", "null", "~"}


def is_none(value: Any) -> bool:
    """Whether a value is empty or None, in any notation."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NONE)


def boolean(value: Any) -> bool:
    """Return True or False, also for the words of command lines."""
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"use true or false, not {value!r}")
    return word in _TRUE


def number(value: Any) -> float:
    """Return a finite number; YAML reads 1e-6 as text."""
    try:
        given = float(value)
    except (TypeError, ValueError):
        given = math.nan
    if not math.isfinite(given):
        raise ValueError(f"use a number, not {value!r}")
    return given


def integer(value: Any) -> int:
    """Return a whole number."""
    if (given := number(value)) != int(given):
        raise ValueError(f"use a whole number, not {value!r}")
    return int(given)


def positive(value: Any) -> int:
    """Return a whole number of at least 1."""
    if (given := integer(value)) < 1:
        raise ValueError(f"use a number of at least 1, not {value!r}")
    return given


def in_steps(every: float, steps: int, unit: int) -> int:
    """Return an interval in optimizer steps: below 1 it is a share of all `steps`, else it counts `unit` steps."""
    return round(every * steps) if 0 < every < 1 else int(every) * unit


def word(value: Any) -> str:
    """Return a name or path."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"use a name, not {value!r}")
    return value


def one_name(value: Any) -> str:
    """Return the only name of a list."""
    found = names(value)
    if len(found) > 1:
        raise LeftError("only one may be named: merge the others into the model of model.path")
    return found[0]


def names(value: Any) -> list[str]:
    """Return a list of at least one word."""
    if not (found := texts(value)):
        raise ValueError(f"use a name, not {value!r}")
    return found


def texts(value: Any) -> list[str]:
    """Return the words of a list, of Python's or JSON's notation of one, or of a text with commas or spaces."""
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    text = str(value).strip()
    if text.startswith("["):
        return [part.strip().strip("'\"") for part in text[1:-1].split(",") if part.strip()]
    return [part for part in re.split(r"[,\s]+", text) if part]


def mapping(value: Any) -> dict[str, Any]:
    """Return a dict, also from JSON or Python's notation of one."""
    if isinstance(value, dict):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            if isinstance(found := read(str(value)), dict):
                return found
    raise ValueError(f"use key-value pairs, not {value!r}")


def equal(value: Any, harmless: Any) -> bool:
    """Whether `value`, in any notation, is `harmless`."""
    text = str(value).strip().lower()
    if isinstance(harmless, bool):
        return text in (_TRUE if harmless else _FALSE)
    if isinstance(harmless, int | float):
        with suppress(ValueError):
            return number(value) == harmless
    return text == str(harmless).lower()


def as_is(value: Any) -> Any:
    """Return the value as it is."""
    return value


def one_of(words: dict[Any, str], otherwise: str) -> Callable[[Any], Any]:
    """Return a converter from words to what `words` lists them under; LeftError says `otherwise` of another {value}."""
    values = {word: value for value, spellings in words.items() for word in spellings.split()}

    def convert(value: Any) -> Any:
        try:
            return values[str(value).strip().lower()]
        except KeyError:
            raise LeftError(otherwise.format(value=value)) from None

    return convert


def tools(value: Any) -> list[dict[str, Any]]:
    """Return functions, given by dotted paths, as entries of a job."""
    return [{"function": function(path)} for path in names(value)]


def environments(value: Any) -> list[dict[str, Any]]:
    """Return the factory of environments, given by its dotted path, as the entry of a job."""
    path = one_name(value)
    return [{"name": slug(path), "factory": function(path)}]


def function(path: str) -> str:
    """Return module:function of a dotted path."""
    module, _, name = path.rpartition(".")
    return f"{module}:{name}"


def slug(name: str) -> str:
    """Return the last part of a path as the name of an entry."""
    return re.sub(r"[^a-z0-9]+", "-", re.split(r"[.:]", name)[-1].lower()).strip("-")[:63] or "entry"


def share(value: Any) -> float:
    """Return a share of a GPU's memory, at most 0.9."""
    if (given := number(value)) > 0.9:
        raise LeftError("vLLM gets at most 0.9 of a GPU: use 0.9")
    return given


def deepspeed(value: Any) -> dict[str, Any]:
    """Return the ZeRO stage and whether the optimizer is offloaded, from a configuration or the name of one."""
    if isinstance(value, dict) or str(value).lstrip().startswith("{"):
        zero = mapping(value).get("zero_optimization", {})
        device = zero.get("offload_optimizer", {}).get("device", "none")
        return {"stage": integer(zero.get("stage", 0)), "offload": device not in ("none", None)}
    found = re.search(r"(?:zero|z|stage)[-_]?([0-3])", str(value).lower())
    if found is None:
        raise LeftError("the name does not show the stage: give grpo convert that file, too, or set zeroStage")
    return {"stage": int(found[1]), "offload": "offload" in str(value).lower()}


def fsdp(value: Any) -> dict[str, Any]:
    """Return the ZeRO stage that shards as FSDP's strategy does, and whether that offloads."""
    words = str(value).lower()
    stage = 0 if "no_shard" in words else 2 if "shard_grad_op" in words or words == "false" else 3
    return {"stage": stage, "offload": "offload" in words}


def accelerate_config(value: Any) -> dict[str, Any]:
    """Return the ZeRO stage of one of TRL's configurations of accelerate, by its name."""
    name = str(value).lower()
    if name in ("single_gpu", "multi_gpu"):
        return {"stage": 0, "offload": False}
    return fsdp(name) if "fsdp" in name else deepspeed(name)
