"""Whatever a program says in one conversation, the engine reads exactly what was sampled and read before, in order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_spec.trainer import TrainerConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.chat_words import ChatWords
from grpo_workload.generation.episode_draft import Turn
from grpo_workload.generation.gateway.conversation import Conversation
from grpo_workload.generation.gateway.refusal import RefusalError
from grpo_workload.generation.gateway.request import read_request
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

FORGETFUL = TOOL_TEMPLATE.replace(
    "message['content'] }}", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) }}"
)
"""Leaves thoughts out of earlier turns, as Qwen3's does."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TRAINING = TrainingConfig(temperature=0.5)


class Words(ChatWords):
    """Without vLLM's parsers, which take seconds to import: `CALL` and a number is a call."""

    def __init__(self, template=TOOL_TEMPLATE):
        tokenizer = make_tiny_tokenizer()
        tokenizer.chat_template = template
        rewards = [{"name": "r", "stopped": {}}]
        config = {"model": {"name": "m"}, "dataset": {"name": "d"}, "rewards": rewards}
        super().__init__(TrainerConfig.model_validate(config), tokenizer)
        self.tokenizer = tokenizer

    def parser(self, tools):
        """Another parser."""
        return self

    def parse(self, text):
        """See `CallParser.parse`."""
        content, *calls = text.split("CALL")
        found = [ToolCall(name="look", arguments={"at": one}, text=f'{{"at": "{one}"}}') for one in calls]
        return content, found


WORDS, FORGETS = Words(), Words(FORGETFUL)


def ask(conversation, messages, **more):
    request = read_request({"model": "m", "messages": messages} | more, TRAINING, "m")
    return conversation.ask(request, 5, 0)


def say(words, text, ask, *, is_cut=False):
    tokens = words.tokenizer(text if is_cut else f"{text}<|im_end|>")["input_ids"]
    whole = len(tokens) <= ask.max_tokens and not is_cut
    tokens = tokens[: ask.max_tokens]
    reason = "stop" if whole else "length"
    return Turn(token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0], finish_reason=reason)


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
spoken = texts.filter(lambda text: "CALL" not in text and text.strip() == text and text)
turns = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["user", "system"]), texts), min_size=1, max_size=3),
        spoken,
        st.integers(0, 2),  # calls
        st.booleans(),  # cut by the program's max_tokens
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(turns=turns, room=st.integers(30, 600), forgets=st.booleans())
def test_a_conversation_is_its_tokens_in_order(turns, room, forgets):
    words = FORGETS if forgets else WORDS
    conversation, messages, asks, sampled = Conversation(words, room, None), [], [], []
    answer, refusals = None, []
    for said, text, num_calls, is_cut in turns:
        new = [
            {"role": "tool", "tool_call_id": one["id"], "content": "seen"}
            for one in (answer.message.get("tool_calls", ()) if answer else ())
        ]
        messages += new + [{"role": role, "content": content} for role, content in said]
        thought = "<think>\nhm\n</think>\n" if forgets else ""
        whole = thought + text + "".join(f"CALL{number}" for number in range(num_calls))
        try:
            asks.append(ask(conversation, messages, tools=TOOLS))
        except RefusalError as error:
            refusals.append(error.code)
            break
        turn = say(words, whole, asks[-1], is_cut=is_cut)
        sampled.append(turn.token_ids)
        answer = conversation.add(turn)
        expected = "length" if turn.finish_reason == "length" else "tool_calls" if num_calls else "stop"
        assert answer.finish_reason == expected
        assert answer.prompt_tokens == len(asks[-1].token_ids)
        messages.append(answer.message | ({"content": answer.message["content"].strip()} if is_cut else {}))
    assert set(refusals) <= {"context_length_exceeded"}
    if not sampled:
        return
    completion = conversation.complete(1.0, 2.0, is_over=False, retries=0)
    tokens = [*completion.episode.prompt_ids, *completion.token_ids]
    assert all(tokens[: len(one.token_ids)] == one.token_ids for one in asks), "the engine has read its own past"
    assert [completion.token_ids[place] for place in completion.own_places] == [
        token for one in sampled for token in one
    ]
    assert len(completion.token_ids) <= room
    assert completion.token_ids[-len(sampled[-1]) :] == tuple(sampled[-1]), "nothing is read behind the last turn"
    if not forgets:
        written = words.tokenizer.apply_chat_template(
            [*completion.episode.asked, *completion.episode.messages], tools=TOOLS, return_dict=False
        )
        if completion.finish_reason == "stop" and not any(calls or cut for *_, calls, cut in turns[: len(sampled)]):
            assert written[: len(tokens)] == tokens


def test_a_message_may_come_as_parts_with_none_for_what_is_missing():
    conversation = Conversation(WORDS, 100, None)
    first = ask(conversation, [{"role": "user", "content": "Hi."}])
    conversation.add(say(WORDS, "Yes. ", first))
    parts = [{"type": "text", "text": "Y"}, {"type": "text", "text": "es."}]
    answer = {"role": "assistant", "content": parts, "refusal": None, "tool_calls": None}
    again = ask(conversation, [{"role": "user", "content": "Hi."}, answer, {"role": "user", "content": "?"}])
    said = WORDS.tokenizer.decode(again.token_ids[len(first.token_ids) :])
    assert said == "Yes. <|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"


def test_a_refused_request_changes_nothing():
    conversation = Conversation(WORDS, 60, None)
    asked = [{"role": "user", "content": "Hi."}]
    conversation.add(say(WORDS, "Yes.", ask(conversation, asked)))
    asked.append({"role": "assistant", "content": "Yes."})
    for new in ([], [{"role": "user", "content": "x" * 60}], [{"role": "tool", "tool_call_id": "no", "content": ""}]):
        with pytest.raises(RefusalError) as caught:
            ask(conversation, [*asked, *new])
        assert caught.value.code != "history"
    after = ask(conversation, [*asked, {"role": "user", "content": "?"}])
    conversation.add(say(WORDS, "Y", after))
    completion = conversation.complete(None, 0.0, is_over=False, retries=1)
    assert [one["content"] for one in completion.episode.messages] == ["Yes.", "?", "Y"]
    assert replace(completion.episode, call_seconds=1.0) == completion.episode
