"""Programs with the real openai package play episodes: what is sampled, refused, lost and scored.

Processes, HTTP, chat template and tokenizer are real; the engine says what a test tells it to. One with real engines is
in tests/trainer/test_programs.py.
"""

import re

import pytest

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Prompt
from support.trainer.gateway import Engine, config_of, play, start
from support.trainer.user_programs import TOOLS

CONFIG = config_of(training={"temperature": 0.7, "stop": ["END"]}, timeoutSeconds=4)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def sessions():
    found = start(CONFIG)
    yield found
    found.close()


def rendered(engine, messages, **how):
    return engine.tokenizer.apply_chat_template(messages, return_dict=False, **how)


def whole(completion):
    return [*completion.episode.prompt_ids, *completion.token_ids]


@pytest.mark.parametrize("program", ["talk", "stream"])
def test_a_conversation_is_what_the_template_writes_and_each_request_continues_the_last(sessions, program):
    engine = Engine("Hello, I am here. ", "Yes.", "Bye.")
    completion, _ = play(sessions, CONFIG, engine, program, says=["Hi.", "Really?", "Bye."], episode=2)
    episode = completion.episode
    assert [one["role"] for one in episode.messages] == ["assistant", "user", "assistant", "user", "assistant"]
    assert episode.asked == ({"role": "user", "content": "Hi."},)
    assert whole(completion) == rendered(engine, [*episode.asked, *episode.messages])[:-1], "but the last newline"
    assert all(whole(completion)[: len(ask.token_ids)] == ask.token_ids for ask in engine.asked)
    own = engine.tokenizer.decode([completion.token_ids[place] for place in completion.own_places])
    assert own == "Hello, I am here. <|im_end|>Yes.<|im_end|>Bye.<|im_end|>"
    assert [one for one in completion.logprobs if one] == [-0.5] * completion.num_own
    assert [(ask.seed, ask.number) for ask in engine.asked] == [(5, 2)] * 3
    assert [ask.num_tokens for ask in engine.asked] == [0, *(stop for _, stop in episode.context)]
    assert (completion.finish_reason, completion.text, episode.num_turns) == ("stop", "Bye.", 3)
    assert episode.reward == (26.0 if program == "talk" else None)
    assert episode.call_seconds > 0


def test_calls_of_tools_are_read_and_answered(sessions):
    engine = Engine(f"I ask.\n{CALL}", "It is 42.")
    completion, _ = play(sessions, CONFIG, engine, "multiplying")
    episode = completion.episode
    assert (episode.reward, episode.num_calls, episode.num_turns) == (1.0, 1, 2)
    calling, result, last = episode.messages
    assert calling["tool_calls"][0]["function"] == {"name": "multiply", "arguments": {"a": 6, "b": 7}}
    assert result == {"role": "tool", "name": "multiply", "content": "42"}
    assert last["content"] == "It is 42."
    assert "multiply" in engine.tokenizer.decode(episode.prompt_ids)
    written = [{**calling, "content": "I ask."}, result, last]
    assert whole(completion) == rendered(engine, [*episode.asked, *written], tools=TOOLS)[:-1]


def test_responses_are_turns_of_the_same_conversations(sessions):
    engine = Engine("Hello. ", "Yes.", "Bye.")
    completion, _ = play(sessions, CONFIG, engine, "responding", says=["Hi.", "Really?", "Bye."])
    episode = completion.episode
    assert (episode.reward, episode.num_turns, episode.forks) == (len("Hello. Yes.Bye."), 3, ())
    assert episode.asked == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."})
    assert whole(completion) == rendered(engine, [*episode.asked, *episode.messages])[:-1]


def test_a_response_goes_on_from_a_chat_completion(sessions):
    completion, _ = play(sessions, CONFIG, Engine("Hello.", "Yes."), "mixing")
    assert (completion.episode.reward, completion.episode.num_turns, completion.episode.forks) == (1.0, 2, ())


def test_streamed_responses_have_the_calls_of_chat_completions(sessions):
    says = f"I ask.\n{CALL}", f"{CALL}\n{CALL}", "It is 42."
    found = [play(sessions, CONFIG, Engine(*says), one)[0] for one in ("multiplying", "responding_with_tools")]
    assert [(one.episode.reward, one.episode.num_calls, one.episode.forks) for one in found] == [(1.0, 3, ())] * 2
    assert whole(found[0]) == whole(found[1])


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ({"temperature": 1.0}, "temperature is 0.7"),
        ({"reasoning": {"effort": "low"}}, "reasoning can only be"),
        ({"text": {"format": {"type": "json_object"}}}, "text can only be"),
        ({"tools": [{"type": "web_search"}]}, "tools must be a list of functions"),
        ({"previous_response_id": "resp_0"}, "no response 'resp_0'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\] must be text"),
        ({"input": [{"type": "reasoning", "summary": []}]}, r"input\[0\] must be a message"),
        ({"extra_body": {"messages": []}}, "messages is for chat completions"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
    ],
)
def test_responses_that_cannot_be_are_refused_by_name(sessions, asks, message):
    completion, _ = play(sessions, CONFIG, Engine("Hello."), "responding_once", asks=asks)
    assert completion.episode.lost == "program"
    assert re.search(message, completion.episode.failure)


def test_a_response_that_is_cut_is_incomplete(sessions):
    completion, _ = play(sessions, CONFIG, Engine("Hello."), "responding_once", asks={"max_output_tokens": 2})
    assert (completion.episode.reward, completion.finish_reason, completion.num_own) == (0.0, "length", 2)


def test_parallel_and_malformed_calls(sessions):
    other = CALL.replace("6", "5")
    completion, _ = play(sessions, CONFIG, Engine(f"{CALL}\n{other}", "42 and 35."), "multiplying")
    assert completion.episode.num_calls == 2
    assert [one["content"] for one in completion.episode.messages if one["role"] == "tool"] == ["42", "35"]
    engine = Engine(f"{CALL}\n{other}", "42.")
    completion, _ = play(sessions, CONFIG, engine, "multiplying", asks={"parallel_tool_calls": False})
    assert (completion.episode.reward, completion.episode.num_calls, completion.episode.forks) == (1.0, 1, ())
    assert other in engine.tokenizer.decode(whole(completion)), "what was sampled is trained on"
    completion, _ = play(sessions, CONFIG, Engine("<tool_call>\n{broken"), "multiplying")
    assert (completion.episode.reward, completion.episode.num_calls) == (0.0, 0), "the program reads it as text"


@pytest.mark.parametrize("edit", ["answer", "question", "fewer", "again", "inserted", "tools", "back"])
def test_a_history_that_does_not_continue_forks_a_sequence(sessions, edit):
    is_back = edit == "back"  # to its first turn, which is the second sequence's context
    engine = Engine("Hello.", *(["Yes."] if is_back else []), "Bye.")
    completion, _ = play(sessions, CONFIG, engine, "editing", edit=edit)
    assert (completion.episode.reward, completion.episode.num_turns) == (1, len(engine.asked))
    prompt = Prompt(index=3, text="", token_ids=())
    parts = [completion.sequence(number) for number in range(len(completion.num_read(prompt)))]
    sampled = [engine.tokenizer.decode([one.token_ids[place] for place in one.own_places]) for one in parts]
    assert sampled == ["Bye.<|im_end|>", "Hello.<|im_end|>Yes.<|im_end|>" if is_back else "Hello.<|im_end|>"]
    last = engine.asked[-1].token_ids
    assert whole(completion)[: len(last)] == last
    assert (len(completion.episode.prompt_ids) < len(last)) == is_back


def test_a_client_that_sends_a_request_again_gets_the_answer_of_the_first(sessions):
    engine = Engine("Hello.", seconds=3)
    completion, _ = play(sessions, CONFIG, engine, "impatient")
    assert (completion.episode.reward, completion.episode.num_turns, len(engine.asked)) == (1, 1, 1)


def test_conversations_at_once_are_sequences_of_one_episode(sessions):
    engine = Engine("Hello.", "Hi.", seconds=0.2)
    completion, _ = play(sessions, CONFIG, engine, "parallel")
    assert (completion.episode.num_turns, len(completion.episode.forks), completion.episode.retries) == (2, 1, 0)
    assert [one.num_tokens for one in engine.asked] == [0, len(completion.episode.forks[0].token_ids)]


def test_a_program_that_makes_its_history_shorter_where_there_is_no_room_is_not_truncated(sessions):
    completion, _ = play(sessions, CONFIG, Engine("Hello."), "compacting", max_tokens=60)
    assert (completion.finish_reason, completion.text, completion.episode.reward) == ("stop", "Hello.", 1)
    assert len(completion.episode.forks) == 1


@pytest.mark.parametrize(
    "asks",
    [
        {"temperature": 1.0},
        {"top_p": 0.5},
        {"n": 2},
        {"logit_bias": {"5": 1}},
        {"stop": ["\n"]},
        {"seed": 1},
        {"presence_penalty": 1.0},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"max_tokens": 0},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
    ids=lambda asks: next(iter(asks)),
)
def test_what_would_change_the_distribution_is_refused_by_name(sessions, asks):
    engine = Engine("Hello.")
    completion, _ = play(sessions, CONFIG, engine, "asking", asks=asks)
    name = next(iter(asks.get("extra_body", asks)))
    assert completion.episode.lost == "program"
    pattern = rf"environments\[agent\]\.program: .*:any_of_them raised BadRequestError: .*400.*{name}"
    assert re.search(pattern, completion.episode.failure, re.DOTALL), completion.episode.failure
    assert not engine.asked


def test_parameters_that_change_nothing_are_taken_and_max_tokens_is_kept(sessions):
    engine = Engine("Hello, hello.")
    asks = {"temperature": 0.7, "top_p": 1.0, "n": 1, "stop": ["END"], "user": "me", "max_completion_tokens": 4}
    completion, _ = play(sessions, CONFIG, engine, "asking", asks=asks)
    assert (completion.episode.reward, engine.asked[0].max_tokens, completion.finish_reason) == (1, 4, "length")


@pytest.mark.parametrize("catches", [True, False])
def test_tokens_of_both_are_counted_and_then_the_episode_is_over(sessions, catches):
    engine = Engine("Yes, yes.")
    completion, _ = play(sessions, CONFIG, engine, "chatter", catches=catches, max_tokens=200)
    assert (completion.finish_reason, completion.episode.lost) == ("length", None)
    assert 150 < len(completion.token_ids) <= 200
    assert completion.episode.reward == (0.25 if catches else None)
    assert completion.episode.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("program", "row", "why"),
    [
        ("asking", {"messages": [{"role": "user", "content": "x" * 500}]}, "training.maxCompletionLength leaves 400"),
        ("silent", {}, "ended without an answer of the model"),
    ],
)
def test_without_an_answer_there_is_no_episode(sessions, program, row, why):
    completion, _ = play(sessions, CONFIG, Engine("Hello."), program, asks={}, **row)
    assert (completion.episode.lost, completion.token_ids) == ("program", ())
    assert why in completion.episode.failure


def test_a_program_that_waits_is_ended(sessions):
    completion, beats = play(sessions, CONFIG, Engine("Hello."), "waiting")
    assert completion.episode.lost == "timeout"
    assert re.search(r"not done .* within 4 s.*timeoutSeconds.*user_programs.py", completion.episode.failure, re.DOTALL)
    assert len(beats) >= 2


def test_a_model_that_takes_its_time_is_not_the_programs_fault(sessions):
    completion, beats = play(sessions, CONFIG, Engine("Hello.", seconds=5), "asking", asks={})
    assert (completion.episode.reward, completion.episode.lost) == (1, None)
    assert len(beats) <= 2, "the engine reports its own beats"
    assert completion.episode.call_seconds < 4


def test_the_time_of_an_episode_ends_it_and_the_program_may_say_what_it_is_worth(sessions):
    completion, _ = play(sessions, CONFIG, Engine("Hello."), "slow", seconds=1.5)
    assert completion.finish_reason == "length"
    assert completion.episode.reward == completion.episode.num_turns < 3


def test_keys_and_models(sessions):
    first, _ = play(sessions, CONFIG, Engine("Hello."), "other_keys")
    second, _ = play(sessions, CONFIG, Engine("Hello."), "other_keys")
    assert first.episode.lost is None
    assert first.episode.reward != second.episode.reward, "each episode has a process of its own"


def test_an_engine_that_fails_is_no_fault_of_the_environment(sessions):
    with pytest.raises(ValueError, match="the engine is away"):
        play(sessions, CONFIG, Engine(error=ValueError("the engine is away")), "asking", asks={})


def test_a_proxy_and_an_account_for_others_stay_what_they_are(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    config = config_of(env=["HTTP_PROXY", "NO_PROXY", "OPENAI_API_KEY"])
    found = start(config)
    try:
        assert play(found, config, Engine("Hello."), "own_account")[0].episode.reward == 1
    finally:
        found.close()


def test_a_program_without_its_arguments_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"environments\[agent\]\.program: .* Write `def play\(row, \*, base"):
        start(config_of("support.trainer.user_programs:wrong_arguments"))
