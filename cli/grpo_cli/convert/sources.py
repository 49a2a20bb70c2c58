"""Model, dataset and rewards of a draft: names or paths, and what stands in for what no file names. Pure."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from grpo_cli.convert import values as v
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.rows import Kind

_FILES = {".json", ".jsonl", ".parquet", ".csv"}
_ACCURACY = {"accuracy", "accuracy_reward"}
_FILL_IN = "no file says it: fill it in"


def is_path(name: str) -> bool:
    """Whether `name` is a file or folder, not a name on a hub."""
    return name.startswith(("/", ".", "~", "$")) or PurePath(name).suffix in _FILES or name.count("/") > 1


def model(draft: Draft) -> None:
    """`model.name`, or `model.path` for what looks like a path."""
    name = draft.fields.get("model.name")
    if name is None:
        draft.set("model.name", "organization/model", _FILL_IN)
        draft.tell(Kind.LEFT, "model", "not said", _FILL_IN, "model.name")
    elif is_path(name):
        draft.drop("model.name")
        draft.drop("model.revision")
        draft.set("model.path", name)
        _on_a_volume(draft, "model", name, "model.path")


def dataset(draft: Draft) -> None:
    """`dataset`, from whichever format names one."""
    facts = draft.facts
    if "swift_dataset" in facts:
        _swift_dataset(draft, facts["swift_dataset"])
    elif "verl_files" in facts:
        files = facts["verl_files"]
        _one(draft, files)
        _named(draft, files[0])
        draft.set("dataset.preprocess", "verl_rows:prepare", "brings reward_model.ground_truth into `solution`: docs/convert.md has it")
        draft.tell(Kind.LEFT, "columns", "of verl", "write verl_rows.prepare as docs/convert.md shows it", "dataset.preprocess")
    elif "dataset" in facts:
        _named(draft, str(facts["dataset"]))
        if configs := facts.get("dataset_configs"):
            draft.set("dataset.config", configs[0])
    else:
        draft.set("dataset.name", "organization/dataset", _FILL_IN)
        draft.tell(Kind.LEFT, "dataset", "not said", _FILL_IN, "dataset.name")
    if system := facts.get("system"):
        text = " ".join(system) if isinstance(system, list) else str(system)
        if PurePath(text).suffix == ".txt":
            draft.tell(Kind.LEFT, "system", text, "a file: paste its text", "dataset.systemPrompt")
        else:
            draft.set("dataset.systemPrompt", text)


def _swift_dataset(draft: Draft, names: list[str]) -> None:
    _one(draft, names)
    found = re.fullmatch(r"(?:hf::|ms::)?([^#]+?)(?::([^#:]+))?(?:#(\d+))?", names[0])
    name, config, count = found.groups() if found else (names[0], None, None)
    _named(draft, name)
    if config and "dataset.name" in draft.fields:
        draft.set("dataset.config", config)
    if count:
        draft.set("dataset.split", f"train[:{count}]", "the first ones; ms-swift draws them")
        draft.facts["rows"] = int(count)


def _one(draft: Draft, names: list[str]) -> None:
    if len(names) > 1:
        note = "a job has one dataset: write the mixture to a file and name it in dataset.path; the first is taken"
        draft.tell(Kind.LEFT, "datasets", ", ".join(names), note, "dataset")


def _named(draft: Draft, name: str) -> None:
    if is_path(name):
        draft.set("dataset.path", name)
        _on_a_volume(draft, "dataset", name, "dataset.path")
    else:
        draft.set("dataset.name", name)


def _on_a_volume(draft: Draft, what: str, name: str, to: str) -> None:
    absolute = name.startswith("/")
    note = "must be there in the container: mount a volume by podTemplate.volumes and volumeMounts"
    kind = Kind.DIFFERENT if absolute else Kind.LEFT
    draft.tell(kind, what, name, note if absolute else f"a path of another machine: it {note}", to)


def rewards(draft: Draft) -> None:
    """`rewards`, one for each function that is named."""
    facts = draft.facts
    if "reward_file" in facts or "reward_function" in facts:
        module = PurePath(facts.get("reward_file", "reward.py")).stem
        function = f"{_identifier(module)}:{_identifier(facts.get('reward_function', 'compute_score'))}"
        draft.set("rewards", [{"name": "score", "function": function}])
        note = "called as TRL calls it, f(prompts, completions, **columns), not as compute_score: docs/convert.md has a wrapper"
        draft.tell(Kind.LEFT, "custom_reward_function", function, note, "rewards")
        return
    names = facts.get("rewards") or []
    if not names:
        draft.set("rewards", [{"name": "accuracy", "accuracy": {}}], _FILL_IN)
        verl = "verl_files" in facts
        note = "verl scores by data_source: accuracy is math-verify's; choose another (docs/rewards.md)" if verl else _FILL_IN
        draft.tell(Kind.LEFT, "rewards", "not said", note, "rewards")
        return
    weights = [v.number(weight) for weight in facts.get("reward_weights") or []]
    if weights and len(weights) != len(names):
        draft.tell(Kind.LEFT, "reward_weights", weights, f"{len(names)} rewards need as many weights: all are 1", "rewards")
        weights = []
    written: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        reward = _reward(draft, name)
        if weights and weights[number] != 1:
            reward["weight"] = weights[number]
        written.append(reward)
    draft.set("rewards", written)


def _reward(draft: Draft, name: str) -> dict[str, Any]:
    short = re.sub(r"[^a-z0-9]+", "-", name.rsplit(".", 1)[-1].rsplit(":", 1)[-1].lower()).strip("-")[:63] or "reward"
    if name in _ACCURACY:
        return {"name": "accuracy", "accuracy": {}}
    if re.fullmatch(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*", name):
        module, _, function = name.rpartition(".")
        draft.tell(Kind.DIFFERENT, "reward", name, "the module must be on PYTHONPATH in the image", "rewards")
        return {"name": short, "function": f"{module}:{function}"}
    function = f"my_rewards:{_identifier(name)}"
    draft.tell(Kind.LEFT, "reward", name, f"not built in here: write {function} (docs/rewards.md)", "rewards")
    return {"name": short, "function": function}


def _identifier(name: str) -> str:
    word = re.sub(r"\W", "_", name)
    return word if not word[:1].isdigit() else f"_{word}"
