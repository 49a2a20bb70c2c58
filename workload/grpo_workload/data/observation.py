"""The observation of an environment's `reset`, in the prompt: behind its last message, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Completion, Message, Prompt, Text


def with_observation(messages: Sequence[Message], text: str) -> list[Message]:
    """Return chat messages with `text` behind the content of the last one; the given ones stay."""
    *before, last = messages
    content = last["content"]
    more = text if isinstance(content, str) else [{"type": "text", "text": text}]
    return [*before, {**last, "content": content + more}]


def asked(prompt: Prompt, completion: Completion) -> Text:
    """Return what a completion answers: its prompt, with what its environment put into it, or a program's request."""
    if completion.episode and completion.episode.asked:
        return [*completion.episode.asked]
    seen = completion.episode.observation if completion.episode else ""
    if not seen:
        return prompt.text
    return prompt.text + seen if isinstance(prompt.text, str) else with_observation(prompt.text, seen)


def render_observed(tokenizer: Any, prompt: Prompt, text: str) -> tuple[int, ...]:
    """Return the token ids of a prompt with `text` behind its last message, rendered as the prompt was.

    Args:
        tokenizer: one that no other thread uses meanwhile: a copy.
        prompt: a prompt of a job with tools or environments.
        text: what `reset` returned.

    Raises:
        ConfigError: the chat template refuses it.
    """
    assert prompt.rendering is not None
    assert not isinstance(prompt.text, str)
    messages = with_observation(prompt.text, printable(text))
    try:
        rendered = tokenizer.apply_chat_template(messages, return_dict=True, **prompt.rendering)
    except (TemplateError, ValueError) as error:
        raise ConfigError(
            f"environments: the chat template refuses row {prompt.index} with what reset returned: {error}"
        ) from error
    return tuple(rendered["input_ids"])


def printable(text: str) -> str:
    """Return the text with `?` for what no tokenizer takes: halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode("utf-8")
