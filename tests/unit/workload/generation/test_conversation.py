"""Whatever a program says, the engine reads exactly what was sampled and read before, and each turn is trained once."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.chat_words import ChatWords
from grpo_workload.generation.episode_draft import Turn
from grpo_workload.generation.gateway.conversation import Conversation
from grpo_workload.generation.gateway.refusal import RefusalError
from grpo_workload.generation.gateway.request import read_request
from support.trainer.places import config_of
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

FORGETFUL = TOOL_TEMPLATE.replace(
    "message['content'] }}", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) }}"
)
"""Leaves thoughts out of earlier turns, as Qwen3's does."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TRAINING = TrainingConfig(temperature=0.5)
PROMPT = Prompt(index=0, text="", token_ids=(1,))


class Words(ChatWords):
    """Without vLLM's parsers, which take seconds to import: `CALL` and a number is a call."""

    def __init__(self, template=TOOL_TEMPLATE):
        tokenizer = make_tiny_tokenizer(template=template)
        super().__init__(config_of(), tokenizer)
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
        for one in answer.message.get("tool_calls", ()) if answer else ():
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": "seen"})
        messages += [{"role": role, "content": content} for role, content in said]
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
        assert caught.value.code in ("invalid_value", "context_length_exceeded")
    after = ask(conversation, [*asked, {"role": "user", "content": "?"}])
    conversation.add(say(WORDS, "Y", after))
    completion = conversation.complete(None, 0.0, is_over=False, retries=1)
    assert [one["content"] for one in completion.episode.messages] == ["Yes.", "?", "Y"]
    assert replace(completion.episode, call_seconds=1.0) == completion.episode


def sequences(completion):
    """Return the tokens of each sequence, and places of its own ones."""
    count = len(completion.num_read(PROMPT))
    parts = [completion.sequence(number) for number in range(count)]
    return [
        ([*one.prompt_ids(PROMPT), *one.token_ids], [len(one.prompt_ids(PROMPT)) + place for place in one.own_places])
        for one in parts
    ]


def own_of(sequence):
    tokens, places = sequence
    return WORDS.tokenizer.decode([tokens[place] for place in places])


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["on", "back", "anew"]), spoken), min_size=1, max_size=7
    )
)
def test_each_turn_is_of_one_sequence_that_begins_with_what_the_engine_read(moves):
    conversation, histories, said, asks = Conversation(WORDS, 5000, None), [[]], [], []
    for number, (place, how, text) in enumerate(moves):
        history = [] if how == "anew" else histories[-1 if how == "on" else place % len(histories)]
        messages = [*history, {"role": "user", "content": f"Question {number}."}]
        asks.append(ask(conversation, messages))
        turn = say(WORDS, f"{number}{text}", asks[-1])
        said.append(turn.token_ids)
        histories.append([*messages, conversation.add(turn).message])
    assert conversation.num_turns == len(moves)
    assert sorted({one.num_tokens for one in asks}) == [one.num_tokens for one in asks], "each turn has own seeds"
    completion = conversation.complete(1.0, 2.0, is_over=False, retries=0)
    assert completion.num_own == sum(map(len, said)) == sum(len(places) for _, places in sequences(completion))
    for one, turn in zip(asks, said, strict=True):
        begin, whole = len(one.token_ids), [*one.token_ids, *turn]
        trained = [
            tokens
            for tokens, places in sequences(completion)
            if tokens[: len(whole)] == whole and set(range(begin, len(whole))) <= set(places)
        ]
        assert len(trained) == 1, "once, behind what the engine read"
    last, *_ = sequences(completion)
    assert last[0] == [*asks[-1].token_ids, *said[-1]], "the completion's own sequence is that of the last turn"


def test_a_history_made_shorter_begins_a_sequence_and_a_turn_said_again_forks_one():
    conversation = Conversation(WORDS, 400, None)
    asked = [{"role": "user", "content": "Hi."}]
    first = ask(conversation, asked)
    yes = conversation.add(say(WORDS, "Yes.", first)).message
    once = ask(conversation, [*asked, yes, {"role": "user", "content": "A?"}])
    conversation.add(say(WORDS, "A.", once))
    again = ask(conversation, [*asked, yes, {"role": "user", "content": "B?"}])
    conversation.add(say(WORDS, "B.", again))
    short = [{"role": "user", "content": "So far: yes, A, B."}]
    conversation.add(say(WORDS, "Done.", ask(conversation, short)))
    completion = conversation.complete(None, 0.0, is_over=False, retries=0)
    assert [own_of(one) for one in sequences(completion)] == [
        "Done.<|im_end|>",
        "Yes.<|im_end|>A.<|im_end|>",
        "B.<|im_end|>",
    ]
    assert completion.episode.asked == tuple(short)
    assert [one["content"] for one in completion.episode.messages] == ["Done."]
    assert (completion.text, completion.episode.num_turns, completion.weight_updates) == ("Done.", 4, 0)
    fork = completion.episode.forks[1]
    assert fork.prompt_ids == completion.episode.forks[0].prompt_ids == tuple(first.token_ids)
    assert [*fork.prompt_ids, *fork.token_ids][: len(again.token_ids)] == again.token_ids
    assert [place for place, value in enumerate(fork.logprobs) if value == 0.0] == [
        place for span in fork.context for place in range(*span)
    ]


def test_all_sequences_together_may_sample_as_much_as_a_completion_and_a_long_history_takes_of_that():
    conversation = Conversation(WORDS, 40, 60)
    first = ask(conversation, [{"role": "user", "content": "A"}])
    assert first.max_tokens == 40
    conversation.add(say(WORDS, "x" * 20, first))
    assert ask(conversation, [{"role": "user", "content": "B"}]).max_tokens == 40 - 21
    longer = ask(conversation, [{"role": "user", "content": "B" * 70}])
    assert len(longer.token_ids) > 60
    assert len(longer.token_ids) + longer.max_tokens <= 60 + 40
    with pytest.raises(RefusalError, match=r"the request has 2.. tokens") as caught:
        ask(conversation, [{"role": "user", "content": "B" * 200}])
    assert caught.value.code == "context_length_exceeded"
    conversation.add(say(WORDS, "x" * 40, ask(conversation, [{"role": "user", "content": "B"}])))
    with pytest.raises(RefusalError, match="the model has written 40 tokens in this episode"):
        ask(conversation, [{"role": "user", "content": "C"}])
