"""An episode's loop: whatever the model, tools and environment do, its tokens are the turns and results, in order.

A scripted model and scripted environments stand in for both: the loop gets them as arguments. Real ones are in
tests/trainer/generation/test_episodes.py.
"""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.environments.base import EnvironmentLostError, EpisodeTimeoutError, ToolCall, ToolResult
from grpo_workload.generation.episode_draft import Turn
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.limits import Limits

CALL, END = 1000, 2
"""Tokens of the scripted model: a call, and the end of a turn."""
PROMPT = Prompt(index=7, text=[], token_ids=(10, 11), seed=5)


class Words:
    """See `episodes.Words`: each CALL of a turn is a call; a result is its length in tokens of 500, then a 501."""

    def calls(self, token_ids):
        calls = [ToolCall(name="tool", arguments={"place": i}) for i, t in enumerate(token_ids) if t == CALL]
        return f"{list(token_ids)}", "content", calls

    def results(self, last, answers):
        tokens = [500 for _, text in answers for _ in text] + [501]
        return tokens, [{"role": "tool", "name": name, "content": text} for name, text in answers]

    def observed(self, prompt, text):
        return (*prompt.token_ids, *([20] * len(text)))


@dataclass
class Script:
    """`Sessions` of which each does what it is told; counts what is open."""

    failures: list = field(default_factory=list)  # of each session: None, or where and what it raises
    observation: str = ""
    wait_seconds: float = 0.0
    result: str = "xx"
    seconds: float = 0.0
    opened: list = field(default_factory=list)
    num_open: int = 0

    def open(self, columns, seed):
        self.opened.append(seed)
        self.num_open += 1
        failure = self.failures[len(self.opened) - 1] if len(self.opened) <= len(self.failures) else None
        return ScriptedSession(self, failure)


@dataclass
class ScriptedSession:
    """A `Session` of it."""

    script: Script
    failure: tuple | None
    num_calls: int = 0

    @property
    def wait_seconds(self):
        return self.script.wait_seconds

    def _fail(self, where):
        if self.failure is not None and self.failure[0] == where:
            raise self.failure[1]

    async def reset(self):
        self._fail("reset")
        return self.script.observation

    async def call(self, calls, seconds):
        self.num_calls += 1
        self._fail(f"call {self.num_calls}")
        await asyncio.sleep(self.script.seconds)
        return [ToolResult(content=self.script.result, is_failed=call.arguments["place"] == 1) for call in calls]

    async def end(self):
        self._fail("end")
        return 0.5, b"state"

    async def close(self):
        self.script.num_open -= 1


@dataclass
class Model:
    """See `episodes.Sample`: the same turns in each episode, cut where there is no room; keeps what it was asked."""

    turns: list
    asked: list = field(default_factory=list)

    async def __call__(self, ask):
        self.asked.append(ask)
        place = sum(1 for one in ask.token_ids if one == END)
        tokens = self.turns[min(place, len(self.turns) - 1)][: ask.max_tokens]
        assert ask.max_tokens > 0
        reason, logprobs = "stop" if tokens[-1] == END else "length", [-0.25] * len(tokens)
        return Turn(token_ids=list(tokens), logprobs=logprobs, versions=[3], finish_reason=reason)


@pytest.fixture(autouse=True, scope="module")
def slept():
    """Episodes begin again without a pause; returns the pauses that they asked for."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_workload.generation.episodes.pause", sleep)
        yield pauses


LIMITS = {"max_tokens": 100, "max_prompt_tokens": None, "max_iterations": None, "seconds": 60.0, "retries": 2}


def play(script, model, *, prompt=PROMPT, **limits):
    played = Episodes(Limits(**LIMITS | limits), script, Words())
    try:
        return asyncio.run(played.play(prompt, 1, model, lambda: None, lambda: 9))
    finally:
        assert script.num_open == 0, "a session was not given back"


def test_turns_and_results_follow_each_other():
    model = Model([[CALL, 5, END], [CALL, CALL, END], [6, END]])
    completion = play(Script(), model)
    assert completion.token_ids == (CALL, 5, END, 500, 500, 501, CALL, CALL, END, 500, 500, 500, 500, 501, 6, END)
    episode = completion.episode
    assert episode.context == ((3, 6), (9, 14))
    assert completion.num_own == 8
    assert [one for one in completion.logprobs if one] == [-0.25] * 8
    assert (episode.num_turns, episode.num_calls, episode.num_failed_calls) == (3, 3, 1)
    roles = "assistant", "tool", "assistant", "tool", "tool", "assistant"
    assert tuple(message["role"] for message in episode.messages) == roles
    assert (completion.finish_reason, completion.text) == ("stop", "[6, 2]")
    assert (episode.reward, episode.state) == (0.5, b"state")
    assert (completion.weight_version, completion.weight_updates) == (3, 0)
    prefixes = [ask.token_ids for ask in model.asked]
    whole = [*PROMPT.token_ids, *completion.token_ids]
    assert all(whole[: len(prefix)] == prefix for prefix in prefixes), "the engine reads what was sampled, unchanged"
    assert [ask.num_tokens for ask in model.asked] == [0, 6, 14]


def test_a_turn_that_is_cut_is_no_call():
    completion = play(Script(), Model([[CALL] * 50 + [END]]), max_tokens=10)
    assert (completion.finish_reason, completion.episode.num_calls, len(completion.token_ids)) == ("length", 0, 10)


def test_a_result_without_room_is_left_out():
    script = Script(result="x" * 50)
    completion = play(script, Model([[CALL, END], [6, END]]), max_tokens=40)
    assert (completion.token_ids, completion.finish_reason) == ((CALL, END), "length")
    assert completion.episode.num_calls == 1


def test_iterations_are_limited():
    completion = play(Script(), Model([[CALL, END]]), max_iterations=2)
    assert (completion.finish_reason, completion.episode.num_calls, completion.episode.num_turns) == ("stop", 2, 3)


def test_time_in_calls_is_limited_and_the_episode_is_scored():
    script = Script(seconds=0.01)
    completion = play(script, Model([[CALL, END]]), seconds=0.005)
    assert (completion.finish_reason, completion.episode.reward) == ("length", 0.5)
    timed_out = play(Script(failures=[("call 1", EpisodeTimeoutError())]), Model([[CALL, END]]))
    assert (timed_out.token_ids, timed_out.finish_reason) == ((CALL, END), "length")


@pytest.mark.parametrize("where", ["reset", "call 1", "call 2", "end"])
def test_an_environment_that_fails_begins_again_with_the_same_seed(where):
    model = Model([[CALL, END], [CALL, END], [6, END]])
    undisturbed = play(Script(), Model(model.turns))
    script = Script(failures=[(where, EnvironmentLostError("process", "it ended"))] * 2)
    completion = play(script, model)
    assert len(script.opened) == 3
    assert len(set(script.opened)) == 1
    assert completion.token_ids == undisturbed.token_ids
    assert completion.episode.retries == 2
    assert completion.episode.lost is None


def test_an_environment_that_fails_too_often_is_lost():
    script = Script(failures=[("call 1", EnvironmentLostError("timeout", "it hangs"))] * 3)
    completion = play(script, Model([[CALL, END]]))
    assert completion.is_lost
    assert (completion.token_ids, completion.episode.lost, completion.episode.retries) == ((), "timeout", 2)
    assert completion.weight_version == 9


@pytest.mark.parametrize("retries", [1, 0])
def test_an_episode_has_waited_for_all_its_sessions(retries):
    script = Script(failures=[("call 1", EnvironmentLostError("timeout", "it hangs"))], wait_seconds=1.5)
    completion = play(script, Model([[CALL, END], [6, END]]), retries=retries)
    assert (completion.is_lost, completion.episode.wait_seconds) == ((False, 3.0) if retries else (True, 0.0))


def test_an_environment_that_is_away_has_time_to_come_back(slept):
    slept.clear()
    play(Script(failures=[("reset", EnvironmentLostError("connection", "it is away"))] * 6), Model([[END]]), retries=5)
    assert slept == [1, 4, 16, 60, 60]


def test_what_reset_returns_is_in_the_prompt_of_the_episode_alone():
    model = Model([[6, END]])
    completion = play(Script(observation="abc"), model)
    assert completion.prompt_ids(PROMPT) == (10, 11, 20, 20, 20)
    assert model.asked[0].token_ids == [10, 11, 20, 20, 20]
    assert play(Script(), Model([[6, END]])).prompt_ids(PROMPT) == PROMPT.token_ids
    with pytest.raises(ConfigError, match="prompt 7 of the dataset has 5 tokens"):
        play(Script(observation="abc"), Model([[6, END]]), max_prompt_tokens=4)


def test_a_prompt_that_is_too_long_with_what_reset_returned_is_cut_as_rows_are():
    """`dataset.overlongPrompts: truncate`: a row that was cut is rendered again as a whole."""
    script = Script(observation="abc")
    completion = play(script, Model([[6, END]]), max_prompt_tokens=4, truncates_prompts=True)
    assert completion.prompt_ids(PROMPT) == (11, 20, 20, 20)
    cut = replace(PROMPT, token_ids=(8, 9, 10, 11), is_overlong=True)  # of an evaluation, whose rows are cut
    assert play(script, Model([[6, END]]), max_prompt_tokens=4, prompt=cut).prompt_ids(cut) == (11, 20, 20, 20)


def test_a_failing_engine_ends_the_group_and_gives_everything_back():
    script = Script()

    async def sample(ask):
        if ask.number == 1:
            raise ValueError("the engine refuses it")
        await asyncio.sleep(60)

    episodes = Episodes(Limits(**LIMITS), script, Words())
    with pytest.raises(ValueError, match="refuses"):
        asyncio.run(episodes.play_group(PROMPT, 3, sample, lambda: None, lambda: 0))
    assert (len(script.opened), script.num_open) == (3, 0)


TURNS = st.lists(st.lists(st.sampled_from([CALL, 5, 6]), max_size=6).map(lambda body: [*body, END]), min_size=1)


@given(TURNS, st.integers(1, 60), st.integers(0, 12), st.none() | st.integers(1, 3), st.integers(0, 2))
def test_whatever_happens_tokens_are_whole(turns, max_tokens, size, max_iterations, failures):
    script = Script(failures=[("call 1", EnvironmentLostError("process", "it ended"))] * failures, result="x" * size)
    model = Model(turns)
    completion = play(script, model, max_tokens=max_tokens, max_iterations=max_iterations or 20)
    assert 1 <= len(completion.token_ids) <= max_tokens
    assert len(completion.logprobs) == len(completion.token_ids)
    bounds = [place for span in completion.episode.context for place in span]
    assert bounds == sorted(set(bounds)), "parts of the context are apart: a turn is between any two"
    assert all(0 < place < len(completion.token_ids) for place in bounds)
    for place, logprob in enumerate(completion.logprobs):
        is_context = any(start <= place < stop for start, stop in completion.episode.context)
        assert is_context == (logprob == 0.0)
        assert is_context == (completion.token_ids[place] in (500, 501))
    assert (completion.finish_reason == "stop") <= (completion.token_ids[-1] == END)
