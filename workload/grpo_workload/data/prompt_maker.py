"""A prompt, made of a row of the dataset: the user's function, templates, tokens. All of it pickles, for workers."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_workload.algorithm.samples import Message, Prompt
from grpo_workload.data.images import ImageError, ImagePrompts, row_images, with_placeholders
from grpo_workload.data.tool_schemas import ToolSchemas
from grpo_workload.data.user_code import import_function


class PromptError(ConfigError):
    """A prompt of the dataset cannot be used, and trying again would not help; the message names the row."""


class PreprocessError(Exception):
    """A prompt could not be prepared this time, and trying again may help; the message names the row."""


class Preprocess:
    """The user's function `dataset.preprocess`: row -> row."""

    def __init__(self, path: str) -> None:
        """Import the function at `path` (module:function). ConfigError if that fails."""
        self._path = path
        self._function = import_function("dataset.preprocess", path)

    def __reduce__(self) -> tuple[type[Preprocess], tuple[str]]:
        # Pickle the path and not the function: a worker imports it as this process did, even if pickle could not.
        return Preprocess, (self._path,)

    def __call__(self, index: int, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return the row to use instead of row `index`. Random numbers that the function draws depend only on `seed`.

        Raises:
            PromptError: the function raised, or did not return a row with a prompt.
            PreprocessError: the function could not read or reach something, or memory was short.
        """
        what = f"dataset.preprocess: {self._path} of row {index}"
        try:
            with seeded(seed):
                made = self._function(dict(row))
        except (OSError, MemoryError) as error:
            raise PreprocessError(f"{what} {what_was_raised(error)}") from error
        except (Exception, SystemExit) as error:
            raise PromptError(f"{what} {what_was_raised(error)}") from error
        if not isinstance(made, Mapping) or "prompt" not in made:
            kind = (
                f"a row with {', '.join(map(str, made)) or 'no columns'}"
                if isinstance(made, Mapping)
                else f"a {type(made).__name__}"
            )
            raise PromptError(f"{what} returned {kind}; return a dict with `prompt` and the columns that rewards read")
        return dict(made)


def what_was_raised(error: BaseException) -> str:
    """Describe the exception and where it was raised: this text reaches the rank, a worker's traceback does not."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch (on the CPU) within it; afterwards their random numbers continue as before."""
    import torch  # It takes seconds, and workers without dataset.preprocess do not need it.

    python, legacy, generator = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(generator)


_ENDING_TOKENS = 80  # more than the longest tag of a format and some white space have
_SET_BY_US = {"messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Turns rows into prompts, with the templates of the dataset's settings and the model's tokenizer."""

    config: DatasetConfig
    tokenizer: Any
    question_filled: bool = False  # promptTemplate is already around the text
    images: ImagePrompts | None = None  # None: no row has images
    tools: ToolSchemas | None = None  # None: the job has neither tools nor environments

    def __call__(self, index: int, row: Mapping[str, Any]) -> Prompt:
        """Return the prompt of row `index`. PromptError if the row has none, or a setting does not fit it."""
        columns = {name: value for name, value in row.items() if name != "prompt"}
        make = self._of_text if isinstance(row["prompt"], str) else self._of_messages
        try:
            prompt = make(index, row["prompt"], columns)
        except ImageError as error:
            raise PromptError(f"dataset: row {index}: {error}") from error
        return replace(prompt, ending=self.tokenizer.decode(prompt.token_ids[-_ENDING_TOKENS:]))

    def _of_text(self, index: int, prompt: str, columns: dict[str, Any]) -> Prompt:
        if self.tools is not None:
            raise PromptError(
                f"dataset: `prompt` of row {index} is plain text, into which no chat template writes the tools that "
                'the model may call; make it messages: [{"role": "user", "content": ...}]'
            )
        if self.config.system_prompt is not None:
            raise PromptError(
                "dataset.systemPrompt: prompts are plain text, not messages; put it into dataset.promptTemplate"
            )
        if row_images(columns):
            raise ImageError("a prompt with images must be messages, into which they are put, not text")
        text = prompt if self.question_filled else fill(self.config, prompt)
        if self.config.chat_template_kwargs:
            raise PromptError("dataset.chatTemplateKwargs: prompts are plain text, which no chat template changes")
        if not (token_ids := self.tokenizer(text)["input_ids"]):
            raise PromptError(
                f"dataset: `prompt` of row {index} is empty, and a model needs at least one token; remove the row"
            )
        bos = self.tokenizer.bos_token_id
        while bos is not None and token_ids[:2] == [bos, bos]:  # a text that a chat template has made has its own
            del token_ids[0]
        return Prompt(index=index, text=text, token_ids=tuple(token_ids), columns=columns)

    def _of_messages(self, index: int, prompt: Any, columns: dict[str, Any]) -> Prompt:
        if not _is_messages(prompt):
            raise PromptError(
                f"dataset: `prompt` of row {index} must be text or a list of messages with role and content: text, or "
                "parts of the types text and image"
            )
        if self.config.prompt_template is not None and not self.question_filled:
            raise PromptError("dataset.promptTemplate: prompts are messages, not plain text; use dataset.systemPrompt")
        if not self.tokenizer.chat_template:
            raise PromptError(
                "dataset: prompts are messages, but the model's tokenizer has no chat template; use a chat model, "
                "model.chatTemplate, or plain text"
            )
        # Arrow gives every message all keys that any message has, with None for those that it lacks.
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        # As in TRL: the model goes on with an answer that the prompt begins.
        goes_on = messages[-1]["role"] == "assistant"
        how: dict[str, Any] = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        variables = self._variables(index, columns)
        parts, images = with_placeholders(messages, row_images(columns))
        # Of parts, those without images and without Arrow's None: logs are JSON.
        messages = [
            message if isinstance(message["content"], str) else cleaned
            for message, cleaned in zip(messages, parts, strict=True)
        ]
        if self.tools is not None:
            if images:
                raise PromptError(f"dataset: row {index} has images, which jobs with tools or environments cannot have")
            how["tools"] = self._schemas(index, columns)
        if images:
            return self._with_images(index, messages, parts, images, columns, how | variables)
        try:
            token_ids = self.tokenizer.apply_chat_template(messages, return_dict=True, **how, **variables)["input_ids"]
        except (TemplateError, ValueError) as error:
            raise PromptError(f"dataset: the chat template refuses row {index}: {error}") from error
        rendering = None if self.tools is None else how | variables
        return Prompt(index=index, text=messages, token_ids=tuple(token_ids), columns=columns, rendering=rendering)

    def _with_images(
        self,
        index: int,
        messages: list[Message],
        parts: list[Message],
        images: list[Any],
        columns: dict[str, Any],
        arguments: dict[str, Any],
    ) -> Prompt:
        if self.images is None:
            raise ImageError("its prompt has images, which this dataset cannot have")
        template = self.images.template() or self.tokenizer.chat_template
        try:
            text = self.tokenizer.apply_chat_template(parts, chat_template=template, tokenize=False, **arguments)
        except (TemplateError, ValueError) as error:
            raise PromptError(f"dataset: the chat template refuses row {index}: {error}") from error
        try:
            token_ids, shown = self.images(text, images, self.config.max_pixels)
        except OSError as error:
            raise PreprocessError(f"dataset: reading an image of row {index} {what_was_raised(error)}") from error
        return Prompt(index=index, text=messages, token_ids=token_ids, columns=columns, images=shown)

    def _schemas(self, index: int, columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        assert self.tools is not None
        try:
            return self.tools.of(columns) or None  # None: its environment has no tools
        except ConfigError as error:
            raise PromptError(f"dataset: row {index}: {error}") from error

    def _variables(self, index: int, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return what row and settings say to the chat template. PromptError if it would ignore a variable."""
        own = columns.get("chat_template_kwargs") or {}
        if not isinstance(own, dict):
            raise PromptError(f"dataset: `chat_template_kwargs` of row {index} must be an object, not {own!r}")
        given = {
            **self.config.chat_template_kwargs,
            **{name: value for name, value in own.items() if value is not None},
        }
        template = str(self.tokenizer.chat_template)
        for name in given:
            is_ours = name in _SET_BY_US or (name == "tools" and self.tools is not None)
            if is_ours or not re.search(rf"\b{re.escape(name)}\b", template):
                where = (
                    "dataset.chatTemplateKwargs"
                    if name in self.config.chat_template_kwargs
                    else f"dataset: row {index}"
                )
                raise PromptError(f"{where}: the model's chat template has no variable {name!r} to set; remove it")
        return given


def fill(config: DatasetConfig, text: str) -> str:
    """Put promptTemplate around `text`."""
    return text if config.prompt_template is None else config.prompt_template.replace("{prompt}", text)


def _is_messages(prompt: Any) -> bool:
    def is_part(part: Any) -> bool:
        return isinstance(part, dict) and part.get("type") in ("text", "image")

    def is_message(message: Any) -> bool:
        content = message.get("content") if isinstance(message, dict) else None
        has_content = isinstance(content, str) or (isinstance(content, list) and all(map(is_part, content)))
        return has_content and isinstance(message.get("role"), str)

    return isinstance(prompt, list) and bool(prompt) and all(is_message(message) for message in prompt)
