"""`Scorer`: what each kind of reward does, so that nobody has to ask of which kind one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.rewards.trl_signature import Logged, ReturnedError, TrainerState, Values

RewardFunction = Callable[[list[Prompt], list[Completion]], Values]


class RewardError(Exception):
    """A reward function failed; the message names the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Arguments of a call of a reward beside prompts and completions."""

    moved: Callable[[], None] = lambda: None  # to call when an answer has been scored while others are still to be
    state: TrainerState = TrainerState()
    seed: int = 0  # of the random numbers that users' functions draw


class Scorer:
    """Scores completions. Where a kind of reward has nothing to do, it leaves the method as it is here."""

    limits_itself: ClassVar[bool] = False
    """Whether `score` ends in time by itself."""
    is_watched: ClassVar[bool] = True
    """Whether the rank ends if Python's lock is held for longer than the reward's limit while this one scores."""
    is_reusable: ClassVar[bool] = False
    """Whether a reward with the same settings, of an evaluation, may use the same object."""
    wants_environments: bool = False
    """Whether it reads the states of environments; known after `check_columns`."""

    def score(self, prompts: list[Prompt], completions: list[Completion], circumstances: Circumstances) -> Values:
        """Return the values of completions[i], an answer to prompts[i]; called in a thread."""
        raise NotImplementedError

    def ready(self) -> None:
        """Wait until it can score. ConfigError or RewardError if it never will."""

    def check_columns(self, source: PromptSource, *, has_environments: bool) -> None:
        """Raise ConfigError if it cannot score the rows of `source`, in a job that has environments or not."""

    def check_row(self, prompt: Prompt) -> None:
        """Start to compare the references of a prompt's row with themselves."""

    def end_check(self, dataset: str) -> None:
        """Log which rows of `dataset`, a field's name, have references that cannot be compared."""

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Start what can be scored before all completions are there; `score` gets the same completions later."""

    def take_timeouts(self) -> int | None:
        """Return the number of answers since the last call that were not compared in time; None: it compares none."""
        return None

    def take_logged(self) -> Logged | None:
        """Return what was logged in the last call of `score`, once; None: it logs nothing."""
        return None

    def close(self) -> None:
        """End all processes and requests."""


class Function(Scorer):
    """A function that is built in."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def score(self, prompts: list[Prompt], completions: list[Completion], circumstances: Circumstances) -> Values:
        """Call the function."""
        return self._function(prompts, completions)


def about_returned(name: str, error: ReturnedError, prompts: Sequence[Prompt]) -> str:
    """Say that a function returned no values, or too many or few, and what it must return."""
    return (
        f"rewards[{name}] {error}{of_row(error.completion, prompts)}; write `return [score(text) for text in "
        "completions]`, where score gives a number, or None where the reward does not apply"
    )


def of_row(completion: int | None, prompts: Sequence[Prompt]) -> str:
    """Say of which row's prompt a completion is an answer; nothing if it is not known."""
    return "" if completion is None else f", an answer to prompt {prompts[completion].index} of the dataset"
