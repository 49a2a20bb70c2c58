"""A script that calls TRL's GRPOTrainer -> options of TRL, and the code, rows and remarks that go with them. Pure."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping
from math import gcd
from pathlib import PurePath
from typing import Any

from grpo_cli.convert.python.module import Module
from grpo_cli.convert.python.script import Script
from grpo_cli.convert.python.values import Code, Made, Opaque, opaque
from grpo_cli.convert.rows import Source

ROWS = "rows.jsonl"
FOLDER = "/etc/code"
"""Folder in which a job finds the files of a script."""
_PEFT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's defaults
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory")
_NESTED = {"model_init_kwargs", "generation_kwargs"}  # their keys are options as others
_OF_COMMAND = "get_quantization_config"  # of options that the command line may have
_POSITIONS = ("model", "reward_funcs", "args", "train_dataset")
_OF_LOADING = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
SCORED_BY_ITSELF = "environment.get_reward"
"""Stands for the reward that an environment has by itself."""


def read_trainer(file: str, text: str, variables: Mapping[str, str]) -> Source:
    """Return what a script says. ValueError, with the line, if it is not Python or does not train once with TRL."""
    script = Script(text, variables)
    trainers = [made for made in script.made if made.function == "GRPOTrainer"]
    if len(trainers) != 1:
        lines = ", ".join(str(made.line) for made in trainers)
        raise ValueError(f"one call of GRPOTrainer is needed, found {f'some in lines {lines}' if lines else 'none'}")
    return _Reading(file, script, trainers[0]).source()


class _Reading:
    def __init__(self, file: str, script: Script, trainer: Made) -> None:
        self._script, self._trainer = script, trainer
        stem = re.sub(r"\W", "_", PurePath(file).stem)
        self._module = Module(script, f"{stem}_code")
        self._source = Source(file, "trl", environment=script.environment, used=script.used)

    def source(self) -> Source:
        script, trainer, source = self._script, self._trainer, self._source
        given = dict(zip(_POSITIONS, trainer.arguments, strict=False)) | trainer.options
        if script.is_parsed:
            script.used.update(script.variables)
            source.options |= script.variables
        for name in ("args", "peft_config"):
            match made := given.pop(name, None):
                case Made(function="GRPOConfig"):
                    for option, value in made.options.items():
                        self._take(option, value)
                case Made(function="LoraConfig"):
                    for option, value in {"use_peft": True, **_PEFT, **made.options}.items():
                        self._take(option if option.startswith(("lora_", "use_")) else f"lora_{option}", value)
                case Made(function="get_peft_config") | None:  # of the command line
                    pass
                case _:
                    self._take(name, made)
        model = given.pop("model", None)
        if isinstance(model, Made) and model.function == "from_pretrained":
            for option, value in model.options.items():
                self._take(option, value)
            model = next(iter(model.arguments), None)
        if model is not None:
            self._take("model_name_or_path", model)
        for name in _FUNCTIONS:
            if (value := given.pop(name, None)) is not None:
                source.options[name] = self._functions(value)
        factory = trainer.options.get("environment_factory")
        if isinstance(factory, Code) and "get_reward" in {getattr(one, "name", "") for one in ast.walk(factory.node)}:
            source.options["reward_funcs"] = [*source.options.get("reward_funcs", ()), SCORED_BY_ITSELF]
        self._dataset(given.pop("train_dataset", None))
        for name, value in given.items():
            self._take(name, value)
        moved = {effect.node for effect in self._module.changes()}
        if text := self._module.text():
            source.files[f"{self._module.name}.py"] = text
        for node in dict.fromkeys(effect.node for effect in script.effects if effect.node not in moved):
            note = "the script does this besides, and a job does not: do it before, for example in the image"
            source.remarks.append((f"line {node.lineno}", f"{' '.join(ast.unparse(node).split())[:80]}: {note}"))
        for name, cause in self._module.unknown.items():
            note = f"it is None in {self._module.name}.py: give it with --set {name}=value"
            source.remarks.append((name, f"{_why(cause)}: {note}"))
        source.packages = tuple(sorted(self._module.packages))
        return source

    def _take(self, name: str, value: Any) -> None:
        """Take an option of TRL."""
        if name in _NESTED and isinstance(value, dict):
            for key, one in value.items():
                self._take(key, one)
            return
        if self._script.is_of_command(value) or getattr(value, "function", "") == _OF_COMMAND:
            return
        if isinstance(value, list) and value and all(isinstance(one, Opaque) for one in value):
            self._source.options[name] = " ".join(getattr(one, "function", one.text) for one in value)
        elif (cause := opaque(value)) and not isinstance(value, Code):
            self._source.options[name], self._source.unknown[name] = cause.text, _why(cause)
        else:
            self._source.options[name] = value.text if isinstance(value, Code) else value

    def _functions(self, value: Any) -> list[str]:
        """Return the dotted paths of functions or classes, which the module has then, and the names of others."""
        found = []
        for number, one in enumerate(value if isinstance(value, list | tuple) else [value]):
            path = self._module.path(one, f"function_{number}") if isinstance(one, Opaque) else str(one)
            found.append(path.removeprefix("trl.rewards."))
        return found

    def _dataset(self, value: Any) -> None:
        """Take the dataset: its rows if the script has them, and the functions that change them."""
        changes: list[Opaque] = []
        rows: list[Any] = []
        while isinstance(value, Opaque):
            match value:
                case Made(function="load_dataset"):
                    named = dict(zip(("path", "name"), value.arguments, strict=False)) | value.options
                    for name, one in named.items():
                        self._take(_OF_LOADING.get(name, name), one)
                    break
                case Made(function="from_dict", arguments=(dict() as columns,)) if not opaque(columns):
                    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
                    break
                case Made(function="from_list", arguments=(list() as items,)) if not opaque(items):
                    rows = items
                    break
                case Made(function="map", arguments=(Opaque() as change,), of=held):
                    changes.insert(0, change)
                case Made(function="[]", arguments=(str() as split,), of=held):
                    self._source.options["dataset_train_split"] = split
                case Made(function="shuffle", of=Made() as held):  # as a job does
                    pass
                case Made(of=Made() as held):
                    note = f"{value.function} of the dataset: a job has all rows: write those that you want to a file"
                    self._source.remarks.append((f"line {value.line}", f"{note} and name it in dataset.path"))
                case _:
                    cause = (opaque([*value.arguments]) or value) if isinstance(value, Made) else value
                    note = f"{_why(cause)}: write the rows to a file (to_json) and name it in dataset.path"
                    self._source.remarks.append(("train_dataset", note))
                    break
            value = held
        if rows:
            self._source.options["train_dataset"] = f"{FOLDER}/{ROWS}"
            self._source.files[ROWS] = _lines(rows)
            self._source.rows = len(rows)
        if changes:
            names = [getattr(one.node, "name", f"({ast.unparse(one.node)})") for one in changes]
            body = "".join(f"    row = {{**row, **{name}(row)}}\n" for name in names)
            self._module.add(f"def prepare_row(row):\n{body}    return row", changes[0].scope)
            self._source.preprocess = f"{self._module.name}:prepare_row"


def _why(cause: Opaque) -> str:
    return f"line {cause.line}: only a run shows {cause.text[:60]}"


def _lines(rows: list[Any]) -> str:
    """Return rows as JSON, one a line; those that are there several times as often as the others, once."""
    counts = Counter(json.dumps(row) for row in rows)
    share = gcd(*counts.values())
    return "".join(f"{line}\n" * (count // share) for line, count in counts.items())
