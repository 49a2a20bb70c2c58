"""Asserts that prompts show the model its tools, and what `reset` returned behind the last user message."""

import pickle

import pytest

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_workload.data.observation import render_observed, with_observation
from grpo_workload.data.prompt_maker import PromptError, PromptMaker
from grpo_workload.data.tool_schemas import ToolSchemas
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE


def schema(name):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}


ADD, GUESS, MOVE = map(schema, ("add", "guess", "move"))
ASKED = [{"role": "user", "content": "Six and seven?"}]


def make_maker(tools, **fields):
    tokenizer = make_tiny_tokenizer(template=TOOL_TEMPLATE)
    return PromptMaker(DatasetConfig.model_validate({"name": "d"} | fields), tokenizer, tools=tools)


def text_of(maker, prompt):
    return str(maker.tokenizer.decode(prompt.token_ids))


def test_a_rows_tools_are_the_jobs_and_its_environments():
    one = ToolSchemas(tools=[ADD], environments={"wordle": [GUESS]})
    assert one.of({}) == one.of({"environment": "anything"}) == one.all() == [ADD, GUESS]
    two = ToolSchemas(tools=[ADD], environments={"wordle": [GUESS], "maze": [MOVE]})
    assert two.of({"environment": "maze"}) == [ADD, MOVE]
    assert two.all() == [ADD, GUESS, MOVE]
    assert ToolSchemas(tools=[ADD]).of({"environment": "a column like any other"}) == [ADD]
    assert pickle.loads(pickle.dumps(two)) == two
    for columns, message in [({}, "does not say which"), ({"environment": "mase"}, "names 'mase'; there are wordle")]:
        with pytest.raises(PromptError, match=rf"dataset: row 3: its column `environment` {message}"):
            make_maker(two)(3, {"prompt": ASKED} | columns)


def test_prompts_show_the_tools():
    maker = make_maker(ToolSchemas(tools=[ADD]))
    prompt = pickle.loads(pickle.dumps(maker))(0, {"prompt": ASKED})
    with_tools = maker.tokenizer.apply_chat_template(ASKED, tools=[ADD], tokenize=False, add_generation_prompt=True)
    assert text_of(maker, prompt) == with_tools
    assert '"name": "add"' in with_tools
    plain = make_maker(None)(0, {"prompt": ASKED})
    assert plain.rendering is None
    without = make_maker(ToolSchemas(environments={"quiet": []}))(0, {"prompt": ASKED})
    assert without.token_ids == plain.token_ids


def test_what_cannot_show_tools_is_refused():
    maker = make_maker(ToolSchemas(tools=[ADD]))
    with pytest.raises(PromptError, match=r"dataset: `prompt` of row 2 is plain text.*make it messages"):
        maker(2, {"prompt": "Six and seven?"})
    with pytest.raises(PromptError, match="dataset: row 2 has images, which jobs with tools"):
        maker(2, {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [b""]})
    with pytest.raises(PromptError, match=r"dataset\.chatTemplateKwargs: .*'tools'"):
        make_maker(ToolSchemas(tools=[ADD]), chatTemplateKwargs={"tools": []})(0, {"prompt": ASKED})


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (ASKED, [{"role": "user", "content": "Six and seven? Go."}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "A"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": " Go."}]}],
        ),
        ([*ASKED, {"role": "assistant", "content": "I"}], [*ASKED, {"role": "assistant", "content": "I Go."}]),
        ([{"role": "system", "content": "Play."}], [{"role": "system", "content": "Play. Go."}]),
    ],
)
def test_an_observation_is_behind_the_last_message(messages, expected):
    before = pickle.dumps(messages)
    assert with_observation(messages, " Go.") == expected
    assert pickle.dumps(messages) == before


def test_an_observed_prompt_is_rendered_as_the_prompt_was():
    maker = make_maker(ToolSchemas(tools=[ADD]), systemPrompt="Play.")
    prompt = maker(0, {"prompt": ASKED})
    assert render_observed(maker.tokenizer, prompt, "") == prompt.token_ids
    observed = maker.tokenizer.decode(render_observed(maker.tokenizer, prompt, " Go."))
    assert observed == text_of(maker, prompt).replace("seven?", "seven? Go.")
    begun = maker(0, {"prompt": [*ASKED, {"role": "assistant", "content": "It"}]})
    assert maker.tokenizer.decode(render_observed(maker.tokenizer, begun, " Go.")).endswith(
        "seven?<|im_end|>\n<|im_start|>assistant\nIt Go."
    )
    render_observed(maker.tokenizer, prompt, "half a surrogate pair: \ud800")
    maker.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match="environments: the chat template refuses row 0 with what reset returned: no"):
        render_observed(maker.tokenizer, prompt, "")
