"""Tokens of tools' results, with all that a chat template puts between a turn of the model and the next one.

It is the difference of two renderings of a made-up conversation, as in TRL, so nothing that the model has sampled is
rendered again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Message
from grpo_workload.data.observation import printable
from grpo_workload.environments.chat_template import REFUSALS, USER, ChatTemplate, assistant, result

logger = logging.getLogger(__name__)

_THOUGHT = "<think>\ndummy\n</think>\n\n"
_CUT = "\n[The rest is cut: the result is too long.]"
_MOST_CHARACTERS = 64  # of a token, on average; what is longer is cut before it is tokenized
_CURE = "set model.chatTemplate to a template that writes calls and results"


class TurnTemplate:
    """Writes results as the model's chat template does."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        """`tokenizer`: one that no other thread uses meanwhile; `variables`: dataset.chatTemplateKwargs."""
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, variables)

    def suffix(self, answers: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids from behind the eos token of a turn up to where the next turn begins.

        Args:
            answers: names of the tools that the turn has called, and what they returned.

        Raises:
            ConfigError: the template refuses it, or it changes what it has written before.
        """
        # Some templates, for example Qwen3's, write an empty thought into the last turn alone: then one with a thought.
        for content in ("", _THOUGHT):
            if (found := self._difference(content, answers)) is not None:
                return found
        raise ConfigError(
            "model.chatTemplate: with a tool's result, the chat template writes the turn before it in another way, so "
            "the model would not go on from what it has sampled; set it to a template that keeps the turns before. TRL "
            "has some, in trl/chat_templates/*_training.jinja"
        )

    def reply(self, last: int, messages: Sequence[Message], called: str | None = None) -> list[int]:
        """Return the token ids between a turn and the next one, with any messages.

        Templates may leave an earlier turn's thought out once a user has replied. Here it stays, as it was sampled.

        Args:
            last: the turn's last token: see `between`.
            messages: what follows the turn, for example of the user.
            called: a tool that the turn has called, if it has.

        Raises:
            REFUSALS: the template refuses it, or does not show where the turn ends.
        """
        plain: Message = {"role": "assistant", "content": "dummy"}
        turns = [USER, plain if called is None else assistant([(printable(called), {})])]
        before, whole = self._template.ids(turns), self._template.ids([*turns, *messages], begins=True)
        eos, begin = self._tokenizer.eos_token_id, len(self._question)
        if eos in before[begin:] and whole[:begin] == self._question:
            return self._joined(last, whole[whole.index(eos, begin) + 1 :])
        if whole[: len(before)] == before:
            return self._joined(last, whole[len(before) :])
        raise TemplateError("it writes a turn in another way once a message follows, and does not end it with eos")

    def between(self, last: int, answers: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids between a turn whose last token is `last` and the next turn: `ending` and `suffix`.

        What ends a turn with calls may also begin their results, as GLM's <|observation|>: then it is there already.
        """
        return self._joined(last, self.suffix(answers))

    def _joined(self, last: int, suffix: list[int]) -> list[int]:
        is_begun = last in self._template.special and suffix[:1] == [last]
        return suffix[1:] if is_begun else [*self.ending(last), *suffix]

    def ending(self, last: int) -> list[int]:
        """Return what must follow a turn that ended with the token `last`, before a suffix: eos, or nothing.

        A turn that a stop text has ended lacks it.
        """
        return self._end if last not in self._template.special else []

    @cached_property
    def _end(self) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return [eos] if eos in self._template.ids([USER, assistant([("dummy", {})])]) else []

    @cached_property
    def _question(self) -> list[int]:
        return self._template.ids([USER])

    def cut(self, text: str, max_tokens: int) -> str:
        """Return at most about `max_tokens` tokens of a result; what was cut ends with a note."""
        text = printable(text)
        begin = text[: max_tokens * _MOST_CHARACTERS]
        token_ids = self._encode(begin)
        if len(token_ids) <= max_tokens and len(begin) == len(text):
            return text
        room = max_tokens - len(self._encode(_CUT))
        note = _CUT if room > 0 else ""
        kept = token_ids[: room if room > 0 else max_tokens]
        return str(self._tokenizer.decode(kept)).rstrip("\N{REPLACEMENT CHARACTER}") + note

    def check(self) -> None:
        """Refuse a template that cannot be used; logs what may surprise.

        Raises:
            ConfigError: it has no place for calls or results, or `suffix` refuses it.
        """
        self._check_is_there()
        name, value, answer = "tool_a8f3e2b1", "argument_d6e7a9f3", "result_c4f9a8e2"
        turns = [USER, assistant([(name, {"text": value})]), result(name, answer)]
        try:
            text = self._template.text(turns)
        except REFUSALS as error:
            raise ConfigError(
                f"model.chatTemplate: the model's chat template refuses calls of tools, or their results ({error}); "
                f"{_CURE}"
            ) from error
        for what, word in {"calls": name, "the arguments of calls": value, "the results of tools": answer}.items():
            if word not in text:
                raise ConfigError(f"model.chatTemplate: the model's chat template leaves out {what}; {_CURE}")
        self.suffix([("dummy", "dummy")])
        if self._difference(_THOUGHT, [("dummy", "dummy")]) is None:
            logger.warning(
                "the model's chat template leaves thoughts out of earlier turns. In an episode the model reads them, "
                "as nothing is rendered again; served later, it does not"
            )

    def check_reply(self) -> None:
        """Refuse a template with which no conversation of a user and the model can go on. Raises ConfigError."""
        self._check_is_there()
        try:
            self.reply(self._tokenizer.eos_token_id, [USER])
        except REFUSALS as error:
            raise ConfigError(
                f"model.chatTemplate: with the model's chat template, no user can reply to the model ({error}); set it "
                "to one for conversations"
            ) from error

    def _check_is_there(self) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.chatTemplate: the model's tokenizer has no chat template; {_CURE}")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _difference(self, content: str, answers: Sequence[tuple[str, str]]) -> list[int] | None:
        """Return the suffix; None if the template writes the turn in another way once a result follows."""
        # The real name: some templates write a result under the name that was called.
        turns = [USER, assistant([(printable(answers[0][0]), {})], content)]
        results = [result(printable(name), printable(text)) for name, text in answers]
        try:
            before, whole = self._template.ids(turns), self._template.ids([*turns, *results], begins=True)
        except REFUSALS as error:
            raise ConfigError(f"model.chatTemplate: the chat template refuses a tool's result: {error}") from error
        eos, begin = self._tokenizer.eos_token_id, len(self._question)
        if eos in before[begin:]:  # behind it, many templates write a newline, which the model does not sample
            before = before[: len(before) - before[::-1].index(eos)]
        return whole[len(before) :] if whole[: len(before)] == before else None
