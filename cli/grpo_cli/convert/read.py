"""Files as users have them -> options by name, and their format. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml

from grpo_cli.convert.accelerate import ACCELERATE
from grpo_cli.convert.openrlhf import ESTIMATOR
from grpo_cli.convert.python.trainer import read_trainer
from grpo_cli.convert.rows import Source
from grpo_cli.convert.shell.script import Command, Script
from grpo_cli.convert.shell.state import is_mark
from grpo_cli.convert.trl import TRL

_SCRIPTS = {".sh", ".bash", ".txt", ""}
_ACCELERATE_KEYS = {"compute_environment", "distributed_type", "num_machines", "machine_rank"}
SERVER = "rollout."
"""Begins the names of options of commands that serve the model, beside those of the command that trains."""
_VERL = "verl.trainer.main_ppo"
_OPENRLHF = "openrlhf.cli.train_ppo_ray"
_LAUNCHERS = {"python", "python3", "torchrun", "accelerate", "deepspeed"}
_BARE = (
    r"--(multi[-_]gpu|use[-_](deepspeed|fsdp)|cpu|quiet|debug|module|same[-_]network|standalone)"  # no value follows
)
_LAUNCHER_MODULES = {"launch", "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def read(file: str, text: str, format_: str | None = None, variables: Mapping[str, str] | None = None) -> list[Source]:
    """Return the options in `text`; a script may have a command that trains and others that serve the model.

    `variables` fill those that a script does not set. Raises ValueError saying what is wrong with the file, and what
    was found instead of options.
    """
    try:
        return _read(file, text, format_, variables or {})
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: this is not YAML: {str(error).splitlines()[0]}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _read(file: str, text: str, format_: str | None, variables: Mapping[str, str]) -> list[Source]:
    suffix = PurePath(file).suffix
    if suffix == ".py":
        return [read_trainer(file, text, variables)]
    if suffix == ".toml":
        why = "its tasks are environments of a hub of its own: name a dataset, or tools and environments, in a job"
        raise ValueError(f"TOML, as prime-rl writes it, is not read: {why} (docs/agents.md)")
    if text.startswith("#!") or (suffix in _SCRIPTS and not _is_mapping(text)):
        return _script(file, text, format_, variables)
    found = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"write options as `name: value`; found {type(found).__name__}")
    found = {str(name): value for name, value in found.items()}  # `on` is True in YAML
    if "zero_optimization" in found:  # DeepSpeed's own file, which accelerate's and TRL's name
        return [Source(file, "accelerate", {"deepspeed_config_file": found})]
    if not _ACCELERATE_KEYS.isdisjoint(found):
        format_ = "accelerate"
    elif not format_:
        is_verl = not {"actor_rollout_ref", "algorithm"}.isdisjoint(found)
        format_ = "ms-swift" if "rlhf_type" in found else "verl" if is_verl else "trl"
    if format_ in ("accelerate", "verl"):
        sections = {"deepspeed_config", "fsdp_config"} if format_ == "accelerate" else None
        options = dict(_flat(found, sections))
    else:
        inner = found.get("model_init_kwargs")
        options = _with_sampling((inner if isinstance(inner, dict) else {}) | found)
    return [Source(file, format_, options, unknown=_references(options))]


def _references(options: dict[str, Any]) -> dict[str, str]:
    """Values that refer to others, as OmegaConf writes it."""
    why = "it refers to another value: write the value itself"
    return {name: why for name, value in options.items() if isinstance(value, str) and re.search(r"\$\{?[\w.]", value)}


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


def _flat(found: dict[str, Any], sections: set[str] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options by dotted path; only the top-level mappings in `sections` are sections, or all where that is None."""
    for name, value in found.items():
        if isinstance(value, dict) and value and (sections is None or name in sections):
            yield from _flat(value, None, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _script(file: str, text: str, format_: str | None, variables: Mapping[str, str]) -> list[Source]:
    script = Script(text, variables)
    found = [(command, sources) for command in script.commands if (sources := _command(file, command, format_, script))]
    trained = [(command, sources) for command, sources in found if not _serves(sources[-1])]
    lines = sorted({command.line for command, _ in trained})
    if not trained:
        wanted = f"trl grpo, swift rlhf --rlhf_type grpo, or python3 -m {_VERL} or {_OPENRLHF}"
        ended = f"; line {script.ended} ends the script" if script.ended else ""
        asked = "".join(f"; {name} is not set: --set {name}=value" for name in sorted(script.asked)) if ended else ""
        raise ValueError(f"one command of {wanted} is needed, found none{ended}{asked}")
    if any(_said(sources) != _said(trained[0][1]) for _, sources in trained):
        where = f"lines {', '.join(map(str, lines))}" if len(lines) > 1 else f"line {lines[0]}, several times"
        unknown = sorted({command.condition for command, _ in trained if command.condition})
        why = f" (only a run decides line {', '.join(map(str, unknown))})" if unknown else ""
        raise ValueError(f"several commands train: {where}{why}. A job is one of them: delete the others")
    return [source for _, sources in found if _serves(sources[-1]) for source in sources] + trained[0][1]


def _said(sources: list[Source]) -> list[tuple[str, dict[str, Any]]]:
    return [(source.format, source.options) for source in sources]


def _serves(source: Source) -> bool:
    return all(name.startswith(SERVER) for name in source.options) and bool(source.options)


def _command(file: str, command: Command, format_: str | None, script: Script) -> list[Source]:
    """Return the options of a command that trains or serves, after those of its launcher; none for other commands."""
    launcher, words = _split(command.words)
    first = next((number for number, word in enumerate(words) if word.startswith("-") and word != "-m"), len(words))
    head, tools = words[:first], {PurePath(word).name for word in words[:first]}
    # What is not known may be options, but for the script that a launcher runs.
    tail = [*filter(is_mark, head[bool(launcher) :]), *words[first:]]
    is_swift, is_trl = bool(tools & {"swift", "megatron"}), "trl" in tools
    if _VERL in words:
        return [_source(file, "verl", _overrides(words[words.index(_VERL) + 1 :]), command, script)]
    if _OPENRLHF in words:
        given = _flags(words[words.index(_OPENRLHF) + 1 :])
        return [_source(file, "openrlhf", {ESTIMATOR: "gae"} | given, command, script)]
    if (is_swift and "rollout" in head) or (is_trl and "vllm-serve" in head) or head[-1:] == ["rollout"]:
        served = {f"{SERVER}{name}": value for name, value in _flags(tail).items()}
        return [_source(file, "trl" if is_trl else "ms-swift", served, None, script)]
    launched, options = _flags(launcher), _flags(tail)
    is_rlhf = (is_swift and "rlhf" in head) or "--rlhf_type" in words
    is_meant = bool(words[first:]) and (not head or bool(launcher))  # by `format_`
    if is_rlhf or (format_ == "ms-swift" and is_meant):
        trained = _source(file, "ms-swift", options, command, script)
    elif (is_trl and "grpo" in head) or (format_ == "trl" and is_meant):
        if is_trl:  # it hands accelerate's own options on
            launched |= {name: options.pop(name) for name in list(options) if name in ACCELERATE.rows.keys() - TRL.rows}
        trained = _source(file, "trl", _with_sampling(options), command, script)
    elif format_ == "verl" and any("=" in word for word in words):
        trained = _source(file, "verl", _overrides(words), command, script)
    else:
        return []
    return [*([_source(file, "accelerate", launched, None, script)] if launched else []), trained]


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Words of a launcher with its own options, and those that begin with the script or module that it runs."""
    begin = next((number for number, word in enumerate(words) if PurePath(word).name in _LAUNCHERS), len(words))
    for number in range(begin + 1, len(words)):
        word, before = words[number], words[number - 1]
        is_bare = re.fullmatch(f"{_BARE}|.*=.*", before, re.DOTALL)
        is_value = before.startswith("--") and not is_bare and not word.endswith(".py")
        if not (word.startswith("-") or is_value or word in _LAUNCHER_MODULES):
            return [word for word in words[:number] if word != "-m"], words[number:]
    return ([], words) if begin == len(words) else (words[: begin + 1], words[begin + 1 :])


def _source(file: str, format_: str, options: dict[str, Any], command: Command | None, script: Script) -> Source:
    """Options as people read them, and why some have no value."""
    environment = command.environment if command else {}
    unknown = _references(options)
    for name, value in (options | environment).items():
        texts = [name, *(value if isinstance(value, list) else [value])]
        if marks := script.marks_in([text for text in texts if isinstance(text, str)]):
            unknown[script.shown(name)] = f"line {marks[0].line}: {marks[0].why}"
    remarks = [
        (f"source {name}", f"line {line}: its variables are not known: give with --set what the script needs of it")
        for line, name in script.sourced
    ]
    return Source(
        file,
        format_,
        {script.shown(name): script.shown(value) for name, value in options.items()},
        {name: script.shown(value) for name, value in environment.items()},
        unknown,
        remarks if command else [],
        script.used,
        is_command=True,
    )


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """`--name value...`, `--name=value` and bare `--name`; a name given twice has its last value, as in argparse.

    A word of which nothing is known may be options as well as a value: it is an option of its own after a value.
    """
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif is_mark(word) and (name is None or found[name]):
            found[word] = [""]
        elif name is not None:
            found[name].append(word)
    return {name: "true" if not values else values[0] if len(values) == 1 else values for name, values in found.items()}


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Overrides as hydra reads them, `name=value` or `+name=value`; other words are options without a value."""
    parts = [word.lstrip("+~-").partition("=") for word in words]
    return {name: value for name, _, value in parts}
