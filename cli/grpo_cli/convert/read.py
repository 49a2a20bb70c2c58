"""Files as users have them -> options by name, and the format they are in. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from grpo_cli.convert.shell import Command, commands

FORMATS = ("trl", "accelerate", "ms-swift", "verl")
_SCRIPTS = {".sh", ".bash", ".txt", ""}
_ACCELERATE_KEYS = {"compute_environment", "distributed_type", "num_machines", "machine_rank"}


@dataclass(frozen=True, slots=True)
class Source:
    """The options of one file."""

    file: str
    format: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def read(file: str, text: str, format_: str | None = None) -> list[Source]:
    """The options in `text`; a script may hold accelerate's beside the trainer's. Raises ValueError saying what was found instead."""
    if text.startswith("#!") or (PurePath(file).suffix in _SCRIPTS and not _is_mapping(text)):
        return _script(file, text, format_)
    try:
        found = json.loads(text) if PurePath(file).suffix == ".json" else yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: this is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: options are needed as `name: value`, found {type(found).__name__}")
    is_accelerates = not _ACCELERATE_KEYS.isdisjoint(found)
    return [_mapping(file, found, "accelerate" if is_accelerates else format_ or _guess(found))]


def _is_mapping(text: str) -> bool:
    try:
        return isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        return False


def _guess(found: dict[str, Any]) -> str:
    if "rlhf_type" in found:
        return "ms-swift"
    return "verl" if {"actor_rollout_ref", "algorithm"} & found.keys() else "trl"


def _mapping(file: str, found: dict[str, Any], format_: str) -> Source:
    match format_:
        case "accelerate":
            return Source(file, format_, dict(_flat(found, {"deepspeed_config", "fsdp_config"})))
        case "verl":
            return Source(file, format_, dict(_flat(found)))
        case _:
            inner = found.get("model_init_kwargs")
            return Source(file, format_, (inner if isinstance(inner, dict) else {}) | found)


def _flat(found: dict[str, Any], sections: set[str] | None = None, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict) and value and (sections is None or name in sections):
            yield from _flat(value, None, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _script(file: str, text: str, format_: str | None) -> list[Source]:
    sources = []
    for command in commands(text):
        sources.extend(_command(file, command, format_))
    trained = {source.format for source in sources} - {"accelerate"}
    if not sources or len(trained) > 1:
        wanted = "trl grpo, swift rlhf --rlhf_type grpo, or python3 -m verl.trainer.main_ppo"
        raise ValueError(f"{file}: one command of {wanted} is needed, found {', '.join(sorted(trained)) or 'none'}")
    return sources


def _command(file: str, command: Command, format_: str | None) -> list[Source]:
    words = command.words
    if "verl.trainer.main_ppo" in words:
        return [Source(file, "verl", dict(_overrides(words[words.index("verl.trainer.main_ppo") + 1 :])), command.environment)]
    arguments = next((number for number, word in enumerate(words) if word.startswith("-") and word != "-m"), len(words))
    flags = _flags(words[arguments:])
    head = words[:arguments]
    swift = any(PurePath(word).name in ("swift", "megatron") for word in head)
    if (swift and "rollout" in head) or head[-1:] == ["rollout"]:
        return [Source(file, "ms-swift", {f"rollout.{name}": value for name, value in flags.items()})]
    if (swift and "rlhf" in head) or "rlhf_type" in flags or format_ == "ms-swift":
        return [Source(file, "ms-swift", flags, command.environment)]
    if words[:2] == ["trl", "grpo"]:
        return [Source(file, "trl", {name: value for name, value in flags.items() if name != "config"}, command.environment)]
    if format_ == "verl" and any("=" in word for word in words):
        return [Source(file, "verl", dict(_overrides(words)), command.environment)]
    if format_ == "trl" and flags:
        return [Source(file, "trl", flags, command.environment)]
    return []


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


def _overrides(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    for word in words:
        name, equals, value = word.lstrip("+~-").partition("=")
        if equals:
            yield name, value
        elif not re.match(r"^(\$\{?@|\d?[<>])", word):
            yield word, ""
