"""Asserts that what chat templates write is read back as calls, and that no text ends a job."""

import logging
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import chat_template_utils as trl_templates
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging

from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.call_parser import CallParser
from grpo_workload.environments.find_parser import find_parser
from support.trainer.tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
SCHEMA = {"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


def tokenizer_of(template, *tokens, eos="<|im_end|>"):
    tokenizer = make_tiny_tokenizer(template=template)
    tokenizer.add_special_tokens({"eos_token": eos, "bos_token": "<|begin|>", "additional_special_tokens": [*tokens]})
    return tokenizer


@pytest.fixture(scope="module")
def hermes():
    return find_parser(tokenizer_of(TOOL_TEMPLATE), None, [SCHEMA])


def multiply(a, b):
    return ToolCall(name="multiply", arguments={"a": a, "b": b}, text=f'{{"a": {a}, "b": {b}}}')


def test_calls_and_the_text_before_them(hermes):
    assert hermes.name == "hermes"
    assert hermes.parse("The answer is 42.") == ("The answer is 42.", [])
    assert hermes.parse(f"I multiply.\n{CALL}") == ("I multiply.\n", [multiply(6, 7)])
    two = f"{CALL}\n{CALL.replace('7', '8')}"
    assert hermes.parse(two) == ("", [multiply(6, 7), multiply(6, 8)])
    assert hermes.parse(two) == ("", [multiply(6, 7), multiply(6, 8)]), "a parser keeps nothing of the turn before"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, }}\n</tool_call>',
        '<tool_call>\n{"name": "multiply"}\n</tool_call>',
        "<tool_call>\n[1, 2]\n</tool_call>",
        "<tool_call>" + "[" * 100_000,
        f'{CALL}<tool_call>{{"nam</tool_call>',
    ],
)
def test_what_was_to_be_a_call_is_a_malformed_one(hermes, text):
    content, calls = hermes.parse(f"So:{text}")
    assert (content, calls) == ("So:", [ToolCall(name="", arguments=None, text=text)])


def test_vllms_parsers_log_no_turn_that_they_cannot_read(hermes, monkeypatch, caplog):
    """Also once an engine is built, with which vLLM sets up its loggers again."""
    configure_logging(LoggingConfig())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    hermes.parse('<tool_call>{"name": "multiply", </tool_call>')
    assert [record.name for record in caplog.records if record.name.startswith("vllm")] == []


@pytest.mark.parametrize(
    "arguments", ['"a=6"', "[6, 7]", "null", '"{\\"a\\": 6}"', '{"a": NaN}', f'{{"a": {"[" * 600}{"]" * 600}}}']
)
def test_arguments_that_are_no_object(hermes, arguments):
    _, calls = hermes.parse(CALL.replace('{"a": 6, "b": 7}', arguments))
    assert calls == [ToolCall(name="multiply", arguments=None, text=arguments)]


def test_numbers_that_json_cannot_hold():
    """Python reads 1e999 as infinity, and would write that as `Infinity`, which no other reader of JSON takes."""
    parser = CallParser("own", lambda text: ("", [("multiply", text)]), None)
    assert parser.parse('{"a": 1e999}')[1] == [ToolCall(name="multiply", arguments=None, text='{"a": 1e999}')]


def test_half_a_surrogate_pair_becomes_a_question_mark(hermes):
    """Neither tokenizers nor files take it, and JSON may escape it."""
    _, (call,) = hermes.parse(CALL.replace('"a": 6', '"a": "\\ud800"'))
    assert call == ToolCall(name="multiply", arguments={"a": "?", "b": 7}, text='{"a": "?", "b": 7}')


def test_a_thought_holds_no_calls(hermes):
    thought = f"<think>\nI could write <tool_call>, or {CALL}\n</think>\n\n"
    assert hermes.parse(f"{thought}42.") == (f"{thought}42.", [])
    assert hermes.parse(f"{thought}So: {CALL}") == (f"{thought}So: ", [multiply(6, 7)])
    assert hermes.parse(f"{thought}<tool_call>{{") == (
        thought,
        [ToolCall(name="", arguments=None, text="<tool_call>{")],
    )


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", CALL, '{"name": ', "multiply", "[", "{", "<|im_end|>", "\n"])


@given(st.lists(PIECES | st.text(st.characters())).map("".join))
def test_no_text_raises(hermes, text):
    content, calls = hermes.parse(text)
    assert calls or content == text


@cache
def parser_of(template, tokens):
    return find_parser(tokenizer_of(template, *tokens), None, [SCHEMA])


@pytest.mark.parametrize(
    ("template", "parser", "tokens"),
    [
        (trl_templates.qwen2_5_chat_template, "hermes", ()),
        (trl_templates.qwen3_chat_template, "hermes", ()),
        (trl_templates.qwen3_5_think_chat_template, "qwen3_coder", ()),
        (trl_templates.glm4moe_chat_template, "glm45", ()),
        (trl_templates.llama3_1_chat_template, "llama3_json", ("<|python_tag|>", "<|eot_id|>")),
    ],
    ids=["qwen2.5", "qwen3", "qwen3.5", "glm4moe", "llama3.1"],
)
@given(text=st.lists(PIECES | st.sampled_from(['{"name": "f", "parameters": ', "<function="]) | st.text()).map("".join))
def test_the_parser_of_known_templates(template, parser, tokens, text):
    found = parser_of(template, tokens)
    assert found.name == parser
    found.parse(text)


def test_a_response_template_comes_first():
    tokenizer = tokenizer_of(trl_templates.qwen3_chat_template)
    trl_templates.add_response_schema(tokenizer)
    parser = find_parser(tokenizer, None, [SCHEMA])
    assert parser.name == "hf"
    content, (call,) = parser.parse(f"<think>\nhm\n</think>\n\nSo: {CALL}")
    assert (content, call.name, call.arguments) == ("So:", "multiply", {"a": 6, "b": 7})
    broken = "<tool_call>{</tool_call>"
    assert parser.parse(broken)[1] == [ToolCall(name="", arguments=None, text=broken)]


def test_the_named_parser(caplog):
    tokenizer = tokenizer_of(TOOL_TEMPLATE)
    assert find_parser(tokenizer, "granite4", [SCHEMA]).parse(CALL)[1] == [multiply(6, 7)]
    assert not caplog.records
    assert find_parser(tokenizer, "glm45", [SCHEMA]).name == "glm45"
    assert "glm45 does not read calls as the chat template writes them" in caplog.text
    for name, message in {
        "hermse": "vLLM has no parser 'hermse'; it has .*hermes",
        "hf": "response template, which this one does not have",
        "mistral": "mistral is not for this model",
    }.items():
        with pytest.raises(ConfigError, match=rf"generation\.toolCallParser: .*{message}"):
            find_parser(tokenizer, name, [SCHEMA])


def test_the_log_names_the_parser_and_others(caplog):
    with caplog.at_level(logging.INFO, "grpo_workload"):
        find_parser(tokenizer_of(TOOL_TEMPLATE), None, [])
    assert "read by the parser hermes (ernie45, granite4 would do, too)" in caplog.text


def test_refused_templates():
    with pytest.raises(ConfigError, match=r"model\.chatTemplate: .* leaves out calls"):
        find_parser(tokenizer_of(CHAT_TEMPLATE), None, [])
    own = TOOL_TEMPLATE.replace("<tool_call>", "<do>").replace("</tool_call>", "</do>")
    with pytest.raises(ConfigError, match=r"no parser reads back .*<do>.*model\.chatTemplate .*toolCallParser"):
        find_parser(tokenizer_of(own), None, [])
