"""A GRPOConfig of TRL, or an object with its attributes -> the manifest of a job, by the table of `grpo convert`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from grpo_cli.convert.conversion import convert
from grpo_cli.convert.rows import Source
from grpo_cli.convert.settle import Given

Reward = str | Callable[..., Any]
Rewards = Reward | Sequence[Reward]
_DERIVED = "generation_batch_size"
"""TRL sets it for the processes that are here, and steps_per_generation says the same without them."""


def job_of(config: object, model: str, dataset: str, rewards: Rewards, name: str | None, **given: int | None) -> str:
    """Return the manifest, and warn of what it does not take over. Raises ValueError."""
    several = [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
    if not several:
        raise ValueError("rewards: name at least one")
    options = dict(_set(config)) | {
        "model_name_or_path": model,
        "dataset_name": dataset,
        "reward_funcs": [_path(reward) for reward in several],
    }
    conversion = convert([Source("GRPOConfig", "trl", options)], Given(nodes=1, **given), name)
    for finding in conversion.left:
        warnings.warn(f"{finding.name} = {finding.value} is not taken over: {finding.note}", stacklevel=3)
    return conversion.manifest


def _set(config: object) -> dict[str, Any]:
    """Return the options that somebody set: of a dataclass, those that differ from their defaults."""
    if isinstance(config, type) or not getattr(config, "__dict__", None):
        raise ValueError(f"config has no options as its attributes: use a GRPOConfig (found {config!r:.60})")
    if not dataclasses.is_dataclass(config):
        return {name: _plain(value) for name, value in vars(config).items() if not name.startswith("_")}
    found = {}
    for field in dataclasses.fields(config):
        value, factory = getattr(config, field.name), field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        empty: Callable[[], Any] = type(value)
        is_made = dataclasses.is_dataclass(value) and value == empty()  # of a default that TRL has read
        if value not in (default, []) and not is_made and field.name != _DERIVED:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _path(reward: Reward) -> str:
    if isinstance(reward, str):
        return reward.replace(":", ".")
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        raise ValueError(f"the reward {name or reward!r} is in no module: write it to a file that the pods have, too")
    return f"{module}.{name}".removeprefix("trl.rewards.")
