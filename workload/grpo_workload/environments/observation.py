"""What an environment shows at the beginning of an episode: text that is put behind the prompt's last message."""

from __future__ import annotations

from grpo_workload.algorithm.samples import Completion, Message, Prompt, Text


def with_observation(messages: list[Message], text: str) -> list[Message]:
    """Return chat messages with `text` behind the content of the last one, as TRL does; the given ones stay."""
    *before, last = messages
    content = last["content"]
    more = text if isinstance(content, str) else [{"type": "text", "text": text}]
    return [*before, {**last, "content": content + more}]


def asked(prompt: Prompt, completion: Completion) -> Text:
    """Return what a completion answers: its prompt, with what its environment has put into it."""
    seen = completion.episode.observation if completion.episode else ""
    if not seen:
        return prompt.text
    return prompt.text + seen if isinstance(prompt.text, str) else with_observation(prompt.text, seen)
