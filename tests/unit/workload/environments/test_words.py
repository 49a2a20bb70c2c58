"""Asserts that what an episode reads and writes, turn by turn, is what the chat template writes of the whole."""

from typing import Any

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.environments.words import ModelWords
from support.trainer.places import config_of
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


def make_words(**episodes: Any) -> tuple[Any, ModelWords]:
    tokenizer = make_tiny_tokenizer(template=TOOL_TEMPLATE)
    return tokenizer, ModelWords(config_of(tools=[{"function": "m:multiply"}], episodes=episodes), tokenizer, [])


def test_an_episode_is_what_the_template_writes():
    tokenizer, words = make_words()
    asked = [{"role": "user", "content": "6 x 7?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    turn = tokenizer(f"I ask.\n{CALL}<|im_end|>")["input_ids"]
    text, content, calls = words.calls(turn)
    assert (text, content) == (f"I ask.\n{CALL}", "I ask.\n")
    assert [(call.name, call.arguments) for call in calls] == [("multiply", {"a": 6})]
    suffix, messages = words.results(turn[-1], [("multiply", "42")])
    assert messages == [{"role": "tool", "name": "multiply", "content": "42"}]
    last = tokenizer("It is 42.<|im_end|>")["input_ids"]
    assert words.calls(last) == ("It is 42.", "It is 42.", [])
    calling = {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 6}}}],
    }
    whole = [*asked, calling, *messages, {"role": "assistant", "content": "It is 42."}]
    assert [*ids, *turn, *suffix, *last] == tokenizer.apply_chat_template(whole, return_dict=False)[:-1]
    stopped, _ = words.results(turn[-2], [("multiply", "42")])
    assert stopped == [tokenizer.eos_token_id, *suffix]


def test_results_are_cut_one_by_one():
    tokenizer, words = make_words(maxToolResponseTokens=60)
    suffix, messages = words.results(tokenizer.eos_token_id, [("a", "x" * 1000), ("b", "short")])
    assert [len(message["content"]) for message in messages] == [60, 5]
    assert messages[0]["content"] in tokenizer.decode(suffix)


def test_observed_prompts():
    tokenizer, words = make_words()
    prompt = Prompt(
        index=0, text=[{"role": "user", "content": "Play."}], token_ids=(1,), rendering={"add_generation_prompt": True}
    )
    assert "Play. Begin.<|im_end|>" in tokenizer.decode(words.observed(prompt, " Begin."))
