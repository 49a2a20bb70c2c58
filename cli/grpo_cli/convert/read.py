"""Files as users have them -> options by name, and their format. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from grpo_cli.convert.shell import Command, commands

_SCRIPTS = {".sh", ".bash", ".txt", ""}
_ACCELERATE_KEYS = {"compute_environment", "distributed_type", "num_machines", "machine_rank"}
_VERL = "verl.trainer.main_ppo"


@dataclass(frozen=True, slots=True)
class Source:
    """The options of one file."""

    file: str
    format: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def read(file: str, text: str, format_: str | None = None) -> list[Source]:
    """Return the options in `text`; a script may have more than one command with options.

    Raises ValueError saying what is wrong with the file, and what was found instead of options.
    """
    if text.startswith("#!") or (PurePath(file).suffix in _SCRIPTS and not _is_mapping(text)):
        return _script(file, text, format_)
    try:
        found = json.loads(text) if PurePath(file).suffix == ".json" else yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: this is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: write options as `name: value`; found {type(found).__name__}")
    format_ = "accelerate" if not _ACCELERATE_KEYS.isdisjoint(found) else format_ or _guess(found)
    if format_ in ("accelerate", "verl"):
        sections = {"deepspeed_config", "fsdp_config"} if format_ == "accelerate" else None
        return [Source(file, format_, dict(_flat(found, sections)))]
    inner = found.get("model_init_kwargs")
    return [Source(file, format_, _with_sampling((inner if isinstance(inner, dict) else {}) | found))]


def _with_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Options and the keys of TRL's `generation_kwargs`, which is a mapping in a file and JSON on a command line."""
    sampling = options.get("generation_kwargs")
    if isinstance(sampling, str) and _is_mapping(sampling):
        sampling = yaml.safe_load(sampling)
    if not isinstance(sampling, dict):
        return options
    return {name: value for name, value in options.items() if name != "generation_kwargs"} | sampling


def _is_mapping(text: str) -> bool:
    try:
        return isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        return False


def _guess(found: dict[str, Any]) -> str:
    if "rlhf_type" in found:
        return "ms-swift"
    return "verl" if {"actor_rollout_ref", "algorithm"} & found.keys() else "trl"


def _flat(found: dict[str, Any], sections: set[str] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options by dotted path; only the top-level mappings in `sections` are sections, or all where that is None."""
    for name, value in found.items():
        if isinstance(value, dict) and value and (sections is None or name in sections):
            yield from _flat(value, None, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _script(file: str, text: str, format_: str | None) -> list[Source]:
    found = [source for command in commands(text) if (source := _command(file, command, format_))]
    trained = sorted({source.format for source in found})
    if len(trained) != 1:
        wanted = f"trl grpo, swift rlhf --rlhf_type grpo, or python3 -m {_VERL}"
        raise ValueError(f"{file}: one command of {wanted} is needed, found {', '.join(trained) or 'none'}")
    return found


def _command(file: str, command: Command, format_: str | None) -> Source | None:
    """Return the options of a command that trains; None for other commands."""
    words, environment = command.words, command.environment
    if _VERL in words:
        return Source(file, "verl", dict(_overrides(words[words.index(_VERL) + 1 :])), environment)
    first = next((number for number, word in enumerate(words) if word.startswith("-") and word != "-m"), len(words))
    head, flags = words[:first], _flags(words[first:])
    swift = any(PurePath(word).name in ("swift", "megatron") for word in head)
    if (swift and "rollout" in head) or head[-1:] == ["rollout"]:
        return Source(file, "ms-swift", {f"rollout.{name}": value for name, value in flags.items()})
    if (swift and "rlhf" in head) or "rlhf_type" in flags or format_ == "ms-swift":
        return Source(file, "ms-swift", flags, environment)
    if words[:2] == ["trl", "grpo"]:
        flags.pop("config", None)
        return Source(file, "trl", _with_sampling(flags), environment)
    if format_ == "verl" and any("=" in word for word in words):
        return Source(file, "verl", dict(_overrides(words)), environment)
    return Source(file, "trl", _with_sampling(flags), environment) if format_ == "trl" and flags else None


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """`--name value...`, `--name=value` and bare `--name`; a name given twice has its last value, as in argparse."""
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name].append(word)
    return {name: "true" if not values else values[0] if len(values) == 1 else values for name, values in found.items()}


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Overrides as hydra reads them, `name=value` or `+name=value`; other words are options without a value."""
    for word in words:
        name, equals, value = word.lstrip("+~-").partition("=")
        if equals:
            yield name, value
        elif not re.match(r"^(\$\{?@|\d?[<>])", word):
            yield word, ""
