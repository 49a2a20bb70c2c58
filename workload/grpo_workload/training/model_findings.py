"""Tells people what works with a model: what `grpo check-model` prints, for one job or for the examples of several.

It looks at all aspects of `model_check`, and at what a job finds out later, before its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_workload.data.images import ImagePrompts
from grpo_workload.data.overlong import prompt_limit
from grpo_workload.data.tokenizer import load_tokenizer
from grpo_workload.generation.vllm_api import engine_class
from grpo_workload.policy.model import rope, vision
from grpo_workload.policy.model.load import read_config
from grpo_workload.training.model_check import AT_START, Aspects, Inconclusive
from grpo_workload.training.subject import Subject


def _engine(subject: Subject) -> str | None:
    """Refuse what vLLM's own configuration refuses."""
    if not subject.has_vllm:
        return None
    return engine_class(subject.config) or Inconclusive(
        "vLLM is not installed here; it checks the model when it starts"
    )


def _context(subject: Subject) -> str:
    """Refuse completions that leave no room for a prompt."""
    limit = prompt_limit(subject.config, subject.config.dataset)
    if limit is None:
        return Inconclusive("the model's configuration does not say how long sequences may be")
    completion = subject.config.training.max_completion_length
    return f"prompts of up to {limit.max_tokens} tokens, with completions of up to {completion}"


def _template(subject: Subject) -> str:
    """Refuse a tokenizer, or a processor of images, that cannot be loaded."""
    model = subject.config.model
    if load_tokenizer(model).chat_template:
        return "the tokenizer has one, or model.chatTemplate is set"
    if vision.has_vision(read_config(subject.config)) and ImagePrompts(model).template():
        return "the processor has one, for prompts with images"
    return Inconclusive("there is none: prompts of plain text work, chat messages need model.chatTemplate")


_ASPECTS: Aspects = AT_START | {"engine": _engine, "context": _context, "chat template": _template}
"""Also what a job finds out when it loads tokenizer, prompts and engine, before its first step."""


class Finding(NamedTuple):
    """A finding about one aspect: a word for it (works, refused or unknown), and why or how."""

    aspect: str
    verdict: str
    text: str


def answers(
    contracts: Mapping[str, Contract], gpu_bytes: int | None, *, are_examples: bool
) -> dict[str, list[Finding]]:
    """Return what is found out about each of several jobs with one model; of the first alone if its files are refused.

    Args:
        contracts: the jobs.
        gpu_bytes: see `Subject`.
        are_examples: the attention and the packing of sequences may be changed to those that the model needs.
    """
    found: dict[str, list[Finding]] = {}
    for name, contract in contracts.items():
        found[name] = list(_findings(contract, gpu_bytes, is_example=are_examples))
        if len(found[name]) == 1:
            break
    return found


def _findings(contract: Contract, gpu_bytes: int | None, *, is_example: bool) -> Iterator[Finding]:
    """Look at all aspects. Nothing follows files that are refused; what refuses several aspects is said once."""
    subject, said = Subject(contract, gpu_bytes), set()
    for aspect, look in _ASPECTS.items():
        try:
            text = look(subject)
        except ConfigError as error:
            if str(error) not in said:
                said.add(str(error))
                yield Finding(aspect, "refused", str(error))
            if aspect == "files":
                return
        else:
            if text is not None:
                yield Finding(aspect, "unknown" if isinstance(text, Inconclusive) else "works", text)
        if aspect == "files" and is_example:
            subject = Subject(_fitted(contract), gpu_bytes)


def _fitted(contract: Contract) -> Contract:
    """Return an example of a job with the length, the attention, and the packing of sequences, that its model needs."""
    length = contract.config.generation.max_model_len or rope.short_length(read_config(contract.config))
    generation = contract.config.generation.model_copy(update={"max_model_len": length})
    contract = contract.model_copy(update={"config": contract.config.model_copy(update={"generation": generation})})
    for kind, size in (("varlen", None), ("varlen", 1), ("eager", None), ("eager", 1)):
        config = contract.config
        training = config.training.model_copy(update={"per_device_train_batch_size": size})
        model = config.model.model_copy(update={"attention": kind})
        one = contract.model_copy(update={"config": config.model_copy(update={"model": model, "training": training})})
        try:
            AT_START["attention"](Subject(one))
        except ConfigError:
            continue
        return one
    return contract
