"""Prompts that leave no room for a completion, and what becomes of them (`dataset.overlongPrompts`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prompt_maker import PromptError


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The most tokens that a prompt may have, and the fate of a row that has more."""

    max_tokens: int
    setting: str  # what sets it, for messages: generation.maxModelLen, or the model's context
    action: Literal["error", "skip", "truncate"]

    def fits(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves room for its completion."""
        return len(prompt.token_ids) <= self.max_tokens

    def truncated(self, prompt: Prompt) -> Prompt:
        """Return the prompt's last tokens: its end has the question, and a chat's generation prompt."""
        return replace(prompt, token_ids=prompt.token_ids[-self.max_tokens :], is_overlong=True)

    def error(self, prompt: Prompt) -> PromptError:
        """Return the error that names the row, its length, the limit, and what to set."""
        action = "skip or truncate" if prompt.images is None else "skip (it has images, which cannot be truncated)"
        return PromptError(
            f"prompt {prompt.index} of the dataset has {len(prompt.token_ids)} tokens; {self.setting} less "
            f"training.maxCompletionLength leaves {self.max_tokens}: set dataset.overlongPrompts to {action}, "
            "remove long prompts from the dataset, or change these settings"
        )


def prompt_limit(config: TrainerConfig, dataset: DatasetConfig) -> PromptLimit | None:
    """Return how long prompts of a dataset may be with room left for their completions; None without a limit.

    ConfigError if there is no room, or the model's configuration cannot be read.
    """
    from transformers import AutoConfig  # seconds, which processes that prepare prompts do not have

    from grpo_workload.data.model_errors import explained

    context, setting, model = config.generation.max_model_len, "generation.maxModelLen", config.model
    if context is None:
        with explained(model, "read the configuration of"):
            read = AutoConfig.from_pretrained(model.source, revision=model.revision or "main")
        context, setting = getattr(read.get_text_config(), "max_position_embeddings", None), "the model's context"
    if context is None:
        return None
    room = context - config.training.max_completion_length
    if room < 1:
        raise ConfigError(
            f"training.maxCompletionLength: {config.training.max_completion_length} tokens leave no room for a prompt; "
            f"{setting} is {context}"
        )
    return PromptLimit(room, setting, dataset.overlong_prompts)
