"""Model, dataset and rewards of a draft, and placeholders for what no file names. Pure."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from grpo_cli.convert import values as v
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.python.trainer import SCORED_BY_ITSELF
from grpo_cli.convert.rows import Kind
from grpo_spec.words import counted

_FILES = {".json", ".jsonl", ".parquet", ".csv"}
_ACCURACY = {"name": "accuracy", "accuracy": {}}
_BUILT_IN = {
    "accuracy": _ACCURACY,
    "accuracy_reward": _ACCURACY,
    SCORED_BY_ITSELF: {"name": "environment", "environment": {}},
    "format": {"name": "format", "format": {"pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"}},
    "think_format_reward": {"name": "format", "format": {"pattern": "<think>(?!.*<think>).*?</think>.*"}},
}
_OF_TRL = {"cosine": "get_cosine_scaled_reward", "repetition": "get_repetition_penalty_reward"}
"""Rewards of ms-swift, and TRL's functions that make nearly the same."""
_FILL_IN = "no file says it: fill it in"
_ON_A_VOLUME = "must exist in the container: mount a volume with podTemplate.volumes and volumeMounts"


def is_path(name: str) -> bool:
    """Whether `name` is a file or folder, not a name on a hub."""
    return name.startswith(("/", ".", "~", "$")) or PurePath(name).suffix in _FILES or name.count("/") > 1


def model(draft: Draft) -> None:
    """Set `model.name`, or `model.path` for what looks like a path."""
    name = draft.fields.get("model.name")
    if name is None:
        draft.set("model.name", "organization/model", _FILL_IN)
        draft.left("model", "not said", _FILL_IN, "model.name")
    elif is_path(name):
        draft.drop("model.name")
        draft.drop("model.revision")
        _name(draft, "model", name)


def dataset(draft: Draft) -> None:
    """Set `dataset`, from whichever format names one."""
    facts = draft.facts
    if "swift_dataset" in facts:
        if count := name_swift(draft, facts["swift_dataset"], "dataset"):
            facts["rows"] = count
    elif "verl_files" in facts:
        name_first(draft, facts["verl_files"], "dataset")
        why = "copies reward_model.ground_truth to `solution`: docs/convert.md has it"
        draft.set("dataset.preprocess", "verl_rows:prepare", why)
        draft.left("columns", "of verl", "write verl_rows.prepare as docs/convert.md shows it", "dataset.preprocess")
    elif "dataset" in facts:
        _name(draft, "dataset", str(facts["dataset"]))
        if configs := facts.get("dataset_configs"):
            draft.set("dataset.config", configs[0])
    elif "dataset.path" not in draft.fields:
        draft.set("dataset.name", "organization/dataset", _FILL_IN)
        draft.left("dataset", "not said", _FILL_IN, "dataset.name")
    if facts.get("filter_overlong"):
        draft.set("dataset.overlongPrompts", "skip", "filter_overlong_prompts")
    if system := facts.get("system"):
        text = " ".join(system) if isinstance(system, list) else str(system)
        if PurePath(text).suffix == ".txt":
            draft.left("system", text, "a file: paste its text", "dataset.systemPrompt")
        else:
            draft.set("dataset.systemPrompt", text)


def name_swift(draft: Draft, names: list[str], section: str) -> int | None:
    """Name the first of ms-swift's datasets; return how many of its rows are taken, None if all are."""
    found = re.fullmatch(r"(?:hf::|ms::)?([^#]+?)(?::([^#:]+))?(?:#(\d+))?", names[0])
    name, config, count = found.groups() if found else (names[0], None, None)
    name_first(draft, names, section, name)
    if config and f"{section}.name" in draft.fields:
        draft.set(f"{section}.config", config)
    if count:
        draft.set(f"{section}.split", f"train[:{count}]", "the first rows; ms-swift draws them at random")
    return int(count) if count else None


def name_first(draft: Draft, names: list[str], section: str, name: str | None = None) -> None:
    """Name the first of several datasets; `name` is how the job writes it."""
    if len(names) > 1:
        note = f"a job has one dataset and the first is taken: write all to a file and name it in {section}.path"
        draft.left("datasets", ", ".join(names), note, section)
    _name(draft, section, name or names[0])


def _name(draft: Draft, section: str, name: str) -> None:
    """Set the section's `name`, or `path` for what looks like a path."""
    path = f"{section}.path"
    draft.set(path if is_path(name) else f"{section}.name", name)
    if name.startswith("/"):
        draft.find(Kind.DIFFERENT, section, name, _ON_A_VOLUME, path)
    elif is_path(name):
        draft.left(section, name, f"a path of another machine: it {_ON_A_VOLUME}", path)


def rewards(draft: Draft) -> None:
    """Set `rewards`, one for each function that is named."""
    facts = draft.facts
    names = facts.get("rewards") or []
    if "reward_file" in facts or "reward_function" in facts:
        module = PurePath(facts.get("reward_file", "reward.py")).stem
        function = f"{_identifier(module)}:{_identifier(facts.get('reward_function', 'compute_score'))}"
        draft.set("rewards", [{"name": "score", "function": function}])
        note = "called as f(prompts, completions, **columns), not as compute_score: docs/convert.md has a wrapper"
        draft.left("custom_reward_function", function, note, "rewards")
    elif names:
        weights = _weights(draft, len(names))
        draft.set("rewards", [_reward(draft, name) | weight for name, weight in zip(names, weights, strict=True)])
    else:
        draft.set("rewards", [_ACCURACY], _FILL_IN)
        verl = "verl scores by data_source, here math-verify checks the answer: or choose another (docs/rewards.md)"
        draft.left("rewards", "not said", verl if "verl_files" in facts else _FILL_IN, "rewards")
    if facts.get("overlong_buffer"):
        weight = {} if (factor := facts.get("overlong_weight", 1)) == 1 else {"weight": factor}
        draft.fields["rewards"].append(_soft_overlong(draft) | weight)


def _weights(draft: Draft, count: int) -> list[dict[str, float]]:
    """The field `weight` of each of `count` rewards, left out where it is 1."""
    weights = [v.number(weight) for weight in draft.facts.get("reward_weights") or [1] * count]
    if len(weights) != count:
        draft.left("reward_weights", weights, f"{counted(count, 'weight')} would be needed: all are 1", "rewards")
        weights = [1.0] * count
    return [{} if weight == 1 else {"weight": weight} for weight in weights]


def _reward(draft: Draft, name: str) -> dict[str, Any]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if name == "soft_overlong":
        return _soft_overlong(draft)
    short = v.slug(name)
    if re.fullmatch(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*", name):
        note = "a module on PYTHONPATH: in the image, or in the ConfigMap"
        draft.find(Kind.DIFFERENT, "reward", name, note, "rewards")
        return {"name": short, "function": v.function(name)}
    function = f"my_rewards:{_identifier(name)}"
    near = f", or use factory: trl.rewards:{_OF_TRL[name]}" if name in _OF_TRL else ""
    draft.left("reward", name, f"not built in: write {function}{near} (docs/rewards.md)", "rewards")
    return {"name": short, "function": function}


def _soft_overlong(draft: Draft) -> dict[str, Any]:
    length = draft.facts.get("overlong_length") or draft.value("training.maxCompletionLength")
    if (cache := draft.facts.get("overlong_cache")) is None:
        cache = length // 4
        note = "no file says over which length: cacheLength is a quarter of maxLength"
        draft.left("soft_overlong", cache, note, "rewards")
    return {"name": "soft-overlong", "softOverlong": {"maxLength": length, "cacheLength": cache}}


def _identifier(name: str) -> str:
    word = re.sub(r"\W", "_", name)
    return word if not word[:1].isdigit() else f"_{word}"
