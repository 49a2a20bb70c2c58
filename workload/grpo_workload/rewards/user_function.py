"""Users' functions as rewards, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import RewardConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.ranks.seeds import reward_seed
from grpo_workload.rewards.process import RewardProcess
from grpo_workload.rewards.scorer import Circumstances, RewardError, Scorer, about_returned
from grpo_workload.rewards.trl_signature import Logged, ReturnedError, Values, trl_arguments


class UserFunction(Scorer):
    """A user's function, in a process that is killed if a call takes too long."""

    limits_itself: ClassVar[bool] = True
    is_reusable: ClassVar[bool] = True  # a judge's model may be in its memory

    def __init__(self, config: RewardConfig, environ: Mapping[str, str]) -> None:
        """Start the process. ConfigError if a variable in the reward's `env` is not set."""
        self._name, self._timeout = config.name, config.timeout_seconds
        self._process = RewardProcess(config, environ)
        self.wants_environments = False  # until `check_columns` has asked

    def score(self, prompts: list[Prompt], completions: list[Completion], circumstances: Circumstances) -> Values:
        """Call the function. ConfigError if it returned no numbers, or too many or few, in its first call."""
        # A later call may have met a rare row. What the first returns, it would return on every attempt.
        kind = RewardError if self._process.has_answered else ConfigError
        arguments = trl_arguments(prompts, completions, circumstances.state)
        try:
            seed = reward_seed(circumstances.seed, self._name)
            return self._process.call(arguments, self._timeout, seed, self._states(completions))
        except ReturnedError as error:
            raise kind(about_returned(self._name, error, prompts)) from error

    def ready(self) -> None:
        """See `RewardProcess.ready`."""
        self._process.ready()

    def check_columns(self, source: PromptSource, *, has_environments: bool) -> None:
        """See `RewardProcess.check`."""
        columns = [*source.batch(0, 1)[0].columns]
        self.wants_environments = self._process.check(columns, has_environments=has_environments)

    def _states(self, completions: list[Completion]) -> list[bytes | None] | None:
        if not self.wants_environments:
            return None
        return [completion.episode.state if completion.episode else None for completion in completions]

    def take_logged(self) -> Logged:
        """See `RewardProcess.take_logged`."""
        return self._process.take_logged()

    def close(self) -> None:
        """See `RewardProcess.close`."""
        self._process.close()
