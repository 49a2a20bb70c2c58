"""Whether episodes can be written and read with a job's model: its chat template, and the parser of its calls."""

from __future__ import annotations

import importlib.util

from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.tokenizer import load_tokenizer
from grpo_workload.environments.find_parser import find_parser
from grpo_workload.environments.turn_template import TurnTemplate


def describe_calls(config: TrainerConfig) -> str | None:
    """Say how the model calls tools; None if vLLM, which has the parsers, is not installed.

    The job's own tools are not needed: made-up ones are written and read.

    Raises:
        ConfigError: the chat template cannot write calls or results, or no parser reads its calls; names the field.
    """
    tokenizer, variables = load_tokenizer(config.model), config.dataset.chat_template_kwargs
    turns = TurnTemplate(tokenizer, variables)
    if len(config.factories) < len(config.environments):
        turns.check_reply()
    if not (config.tools or config.factories):
        return "the chat template goes on behind a user's reply; calls of tools are tried once a program has some"
    turns.check()
    if importlib.util.find_spec("vllm") is None:
        return None
    parser = find_parser(tokenizer, config.generation.tool_call_parser, (), variables, logs=False)
    return f"the chat template writes calls and results; the parser {parser.name} reads calls"
