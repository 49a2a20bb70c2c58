"""TRL's arguments of a reward function (texts, columns, `trainer_state`, `log_metric`, `log_extra`), and its values."""

from __future__ import annotations

import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Complex, Real
from typing import Any

from grpo_spec.words import counted
from grpo_workload.algorithm.samples import Completion, Message, Prompt
from grpo_workload.data.observation import asked

JsonScalar = str | int | float | bool | None
Values = list[float | None]

OWN_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Names of the arguments that are no columns of the dataset."""
ENVIRONMENTS = "environments"
"""Name of an argument that only functions get that name it, in jobs with environments: one object per completion."""
RESERVED = ("mean", "std", "timeouts", "not_finite_ratio", "unscored")
"""Names that metrics of a reward have already."""
_NAME = re.compile(r"\w[\w./ -]{0,99}", re.ASCII)
_MAX_TEXT = 2000
_MAX_INTEGER = 2**63
_UNORDERED = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types that can be iterated over and yet are not a value for each completion: letters, bytes, keys, any order."""


class ReturnedError(Exception):
    """A function returned something else than a list with a number or None for each completion."""

    def __init__(self, text: str, completion: int | None = None) -> None:
        """Take the message, which begins with `returned`, and the number of the one completion that is to blame."""
        super().__init__(text)
        self.completion = completion


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """TRL's `trainer_state`, with the fields that mean the same here."""

    global_step: int = 0  # optimizer steps before the first that trains on the completions
    max_steps: int = 0


@dataclass(slots=True)
class Logged:
    """Values that a reward function logged in a call that scored `count` completions."""

    count: int = 0
    metrics: dict[str, list[float]] = field(default_factory=dict)  # values under each name
    extra: dict[str, list[JsonScalar]] = field(default_factory=dict)  # columns with a value for each completion

    def extra_of(self, part: slice) -> dict[str, list[JsonScalar]]:
        """Return the columns of some completions."""
        return {column: values[part] for column, values in self.extra.items()}

    def spread(self, is_there: Sequence[bool]) -> Logged:
        """Return it for more completions, given which of them it is of; the others have None in the columns."""
        extra = {column: spread(values, is_there) for column, values in self.extra.items()}
        return Logged(len(is_there), self.metrics, extra)

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
        if not isinstance(column, str):
            raise ValueError(f"log_extra: the name of a column is a text, not {column!r}")
        if len(values) != self.count:
            found = counted(len(values), "value")
            raise ValueError(f"log_extra: column {column!r} has {found} for {counted(self.count, 'completion')}")
        self.extra[column] = [_scalar(value) for value in values]


def _scalar(value: Any) -> JsonScalar:
    is_integer = isinstance(value, int) and abs(value) < _MAX_INTEGER  # readers of JSON take no larger ones
    is_plain = value is None or is_integer or (isinstance(value, float) and math.isfinite(value))
    # JSON has no lone surrogates, which texts that were cut inside of a character may have.
    return value if is_plain else str(value)[:_MAX_TEXT].encode(errors="replace").decode()


def spread(values: Sequence[Any], is_there: Sequence[bool]) -> list[Any]:
    """Put the values into the places that are there, and None into the others."""
    ordered = iter(values)
    return [next(ordered) if there else None for there in is_there]


def trl_arguments(prompts: list[Prompt], completions: list[Completion], state: TrainerState) -> dict[str, Any]:
    """Return the arguments that TRL calls a reward function with: every column as a list, chat answers as messages.

    Of episodes, `prompts` have what `reset` returned, `completions` are all turns and results, and `completion_ids`
    have the tokens of both.
    """
    columns = {column: [prompt.columns[column] for prompt in prompts] for column in prompts[0].columns}
    return columns | {
        "prompts": [asked(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)],
        "completions": [
            _trl_completion(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "trainer_state": state,
    }


def _trl_completion(prompt: Prompt, completion: Completion) -> str | list[Message]:
    if completion.episode is not None:
        return [*completion.episode.messages]
    return completion.text if isinstance(prompt.text, str) else [{"role": "assistant", "content": completion.text}]


def names_environments(function: Callable[..., Any]) -> bool:
    """Whether the function has a parameter `environments`; `**kwargs` alone is none, as states may be large."""
    try:
        return ENVIRONMENTS in inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False


def misfit(
    function: Callable[..., Any], params: Mapping[str, Any], columns: Sequence[str], *, has_environments: bool = False
) -> str | None:
    """Say why the function cannot be called with TRL's arguments, `params` and the columns; None if it can.

    None also for a function of C, of which Python does not know the arguments. `has_environments`: whether the job has.
    """
    own = [*OWN_ARGUMENTS, *([ENVIRONMENTS] if has_environments and names_environments(function) else [])]
    if clash := [name for name in params if name in own or name in columns]:
        kind = "a column of the dataset" if clash[0] in columns else "an argument of every call"
        return f"{clash[0]} in `params` has the name of {kind}, which is passed too"
    try:
        # Not of what a decorator wraps: it may pass on other arguments than it takes.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(**dict.fromkeys([*own, *columns]), **params)
    except TypeError as error:
        if f"'{ENVIRONMENTS}'" in str(error) and not has_environments:
            return f"{ENVIRONMENTS} is passed in jobs with spec.environments alone, and this job has none"
        of_dataset = f" and the columns {', '.join(map(str, columns))}" if columns else "; the dataset has no columns"
        return f"{error}. A call has the arguments {', '.join([*own, *params])}{of_dataset}"
    return None


def as_values(result: Any, count: int) -> Values:
    """Return what a function returned for `count` completions as floats and None; infinite for what float cannot hold.

    Raises ReturnedError for anything else, and whatever the objects of the user's code raise.
    """
    shape = getattr(result, "shape", None)  # of an array, a tensor or a data frame
    if isinstance(shape, tuple) and len(shape) != 1:
        raise ReturnedError(f"returned a {type(result).__name__} of shape {tuple(shape)}, not ({count},)")
    if isinstance(result, _UNORDERED) or not isinstance(result, Iterable):
        raise ReturnedError(f"returned {reprlib.repr(result)} ({type(result).__name__}), not a list")
    found = list(result)
    if len(found) != count:
        raise ReturnedError(f"returned {counted(len(found), 'value')} for {counted(count, 'completion')}")
    return [_as_value(value, number, count) for number, value in enumerate(found)]


def _as_value(value: Any, number: int, count: int) -> float | None:
    if value is None:
        return None
    is_number = not isinstance(value, str | bytes | bytearray) and (
        not isinstance(value, Complex) or isinstance(value, Real)
    )
    cause: Exception | None = None
    try:
        if is_number:
            return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        cause = error
    text = f"returned {reprlib.repr(value)} ({type(value).__name__}) for completion {number} of {count}"
    raise ReturnedError(text, number) from cause
