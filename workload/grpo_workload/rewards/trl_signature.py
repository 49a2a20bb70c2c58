"""What TRL passes to a reward function: texts, columns, `trainer_state`, `log_metric` and `log_extra`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from grpo_workload.algorithm.samples import Completion, Message, Prompt

JsonScalar = str | int | float | bool | None

RESERVED = ("mean", "std", "timeouts", "not_finite_ratio")
"""Names that metrics of a reward have already."""
_NAME = re.compile(r"\w[\w./ -]{0,99}", re.ASCII)
_MAX_TEXT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """TRL's `trainer_state`, with the fields that mean the same here."""

    global_step: int = 0  # optimizer steps before the first that trains on the completions
    max_steps: int = 0


@dataclass(slots=True)
class Logged:
    """What a reward function logged in a call that scored `count` completions."""

    count: int = 0
    metrics: dict[str, list[float]] = field(default_factory=dict)  # values under each name
    extra: dict[str, list[JsonScalar]] = field(default_factory=dict)  # columns with a value for each completion

    def extra_of(self, part: slice) -> dict[str, list[JsonScalar]]:
        """Return the columns of some completions."""
        return {column: values[part] for column, values in self.extra.items()}

    def log_metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`: values of one name are averaged over the calls of all ranks in a step."""
        if _NAME.fullmatch(name) is None or name in RESERVED:
            raise ValueError(
                f"log_metric: the name {name!r} cannot be used; take up to 100 letters, digits, _ . - / or spaces, and "
                f"none of {', '.join(RESERVED)}"
            )
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Any) -> None:
        """TRL's `log_extra`: a column of completions.jsonl, as a list or an array."""
        values = list(getattr(values, "tolist", lambda: values)())
        if len(values) != self.count:
            raise ValueError(f"log_extra: column {column!r} has {len(values)} values for {self.count} completions")
        self.extra[column] = [_scalar(value) for value in values]


def _scalar(value: Any) -> JsonScalar:
    is_plain = value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)[:_MAX_TEXT]


def trl_arguments(prompts: list[Prompt], completions: list[Completion], state: TrainerState) -> dict[str, Any]:
    """Return the arguments that TRL calls a reward function with: every column as a list, chat answers as messages."""
    columns = {column: [prompt.columns[column] for prompt in prompts] for column in prompts[0].columns}
    return columns | {
        "prompts": [prompt.text for prompt in prompts],
        "completions": [
            _trl_completion(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "trainer_state": state,
    }


def _trl_completion(prompt: Prompt, completion: Completion) -> str | list[Message]:
    return completion.text if isinstance(prompt.text, str) else [{"role": "assistant", "content": completion.text}]
