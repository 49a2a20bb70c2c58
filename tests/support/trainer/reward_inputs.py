"""Prompts, completions, a dataset and a reward's settings, for tests of rewards."""

from grpo_spec.rewards import RewardConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource


def make_source(columns=None, *, scorer=None):
    to_prompt = lambda index, row: Prompt(index=index, text="?", token_ids=(1,), columns=columns or {})  # noqa: E731
    return PromptSource([{}], to_prompt, seed=0, scorer=scorer)


def make_prompt(text="2 + 2?", **columns):
    return Prompt(index=0, text=text, token_ids=(1,), columns=columns)


def make_completion(text="4", finish_reason="stop", token_ids=(7, 8)):
    logprobs = (-1.0,) * len(token_ids)
    return Completion(token_ids=token_ids, logprobs=logprobs, text=text, finish_reason=finish_reason, weight_version=0)


def make_config(name="mine", **kind):
    return RewardConfig.model_validate({"name": name, **kind})
