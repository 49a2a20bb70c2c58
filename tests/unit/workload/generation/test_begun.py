"""Asserts what becomes of completions that are cut after each step: no token is lost, repeated or one too many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.generation.begun import Begun, PromptKey

MAX_TOKENS, EOS = 6, 0
NOBODY: PromptKey = (-1, -1, -1, ())


def prompt(index):
    return 0, index, 100 + index, (7, index)


def end_of(token, num_left):
    if token == EOS:
        return "stop"
    return "length" if num_left == 0 else None


class Engine:
    """Samples tokens that `data` draws, in each round of some requests only, like an engine whose batch is full."""

    def __init__(self, data):
        self._data = data
        self.written: list[tuple[int, ...]] = []  # prompts with their whole completions
        self.seeds: list[int] = []

    def run(self, begun, first, version):
        """Sample until all of `first` are complete. The log-probability of the n-th token of a sequence is -n."""
        live = {request.name: (request, list(request.token_ids)) for request in begun.ask(first)}
        missing = begun.unfinished(first)
        while missing:
            for name in self._data.draw(st.lists(st.sampled_from(sorted(live)), min_size=1, unique=True)):
                request, tokens = live[name]
                if tokens == request.token_ids:
                    self.seeds.append(request.seed)
                tokens.append(self._data.draw(st.integers(0, 3)))
                num_left = request.max_tokens - len(tokens) + len(request.token_ids)
                reason = end_of(tokens[-1], num_left)
                missing.discard(begun.add(name, tokens[-1:], [-len(tokens)], version, reason) or NOBODY)
                if reason is not None:
                    self.written.append(tuple(tokens))
                    del live[name]
        assert sorted(begun.cut()) == sorted(live)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_steps_get_whole_completions_whatever_was_begun_and_cut(data, num_steps, staleness, per_step, num_generations):
    begun, engine = Begun(MAX_TOKENS), Engine(data)
    steps = [[prompt(step * per_step + place) for place in range(per_step)] for step in range(num_steps)]
    for version, step in enumerate(steps):
        for ahead in steps[version + 1 : version + 1 + staleness]:
            begun.begin(ahead, num_generations)
        begun.begin(step, num_generations)
        engine.run(begun, step, version)
        for key in step:
            completions = [draft.complete("") for draft in begun.drafts(key)]
            _, _, _, prompt_ids = key
            assert sorted((*prompt_ids, *completion.token_ids) for completion in completions) == sorted(
                tokens for tokens in engine.written if tokens[: len(prompt_ids)] == prompt_ids
            )
            assert len(completions) == num_generations
            for completion in completions:
                *others, last = completion.token_ids
                assert EOS not in others
                assert completion.finish_reason == end_of(last, MAX_TOKENS - len(completion.token_ids))
                assert len(completion.token_ids) <= MAX_TOKENS
                assert completion.logprobs == tuple(-3.0 - place for place in range(len(completion.token_ids)))
                newest = completion.weight_version + completion.weight_updates
                assert version - staleness <= completion.weight_version <= newest <= version
        begun.drop(step)
    assert len(set(engine.seeds)) == len(engine.seeds), "a continuation repeats random numbers"
    assert not begun.ask([])


def begun_prompt(num_generations=2):
    begun = Begun(MAX_TOKENS)
    begun.begin([prompt(1)], num_generations)
    return begun, begun.ask([prompt(1)])


def test_a_cut_completion_continues_from_its_tokens_with_a_seed_of_its_own():
    begun, (one, other) = begun_prompt()
    assert one.token_ids == other.token_ids == [7, 1]
    begun.add(one.name, [5, 6], [-1.0, -2.0], 3, None)
    assert begun.cut() == [one.name, other.name]
    again, untouched = begun.ask([])
    assert (again.token_ids, again.max_tokens) == ([7, 1, 5, 6], MAX_TOKENS - 2)
    assert (untouched.token_ids, untouched.max_tokens, untouched.seed) == ([7, 1], MAX_TOKENS, other.seed)
    assert len({one.seed, other.seed, again.seed}) == 3
    assert len({one.name, other.name, again.name, untouched.name}) == 4

    assert begun.add(again.name, [8], [-3.0], 5, "stop") is None, "the other one is missing"
    assert begun.add(untouched.name, [9], [-4.0], 5, "stop") == prompt(1)
    first, second = (draft.complete("text") for draft in begun.drafts(prompt(1)))
    assert (first.token_ids, first.logprobs, first.text) == ((5, 6, 8), (-1.0, -2.0, -3.0), "text")
    assert (first.weight_version, first.weight_updates, first.finish_reason) == (3, 2, "stop")
    assert (second.weight_version, second.weight_updates) == (5, 0)


@pytest.mark.parametrize(("tokens", "reason"), [([EOS], "stop"), ([5] * MAX_TOKENS, "length")])
def test_a_completion_that_ends_right_at_a_cut_is_complete(tokens, reason):
    begun, (request,) = begun_prompt(num_generations=1)
    assert begun.add(request.name, tokens, [-1.0] * len(tokens), 0, reason) == prompt(1)
    assert (begun.cut(), begun.ask([prompt(1)]), begun.unfinished([prompt(1)])) == ([], [], set())
    assert begun.drafts(prompt(1))[0].complete("").finish_reason == reason


def test_the_current_step_comes_first_and_the_next_ones_in_their_order():
    begun = Begun(MAX_TOKENS)
    begun.begin([prompt(3), prompt(4), prompt(1), prompt(3)], 1)
    assert [request.token_ids[1] for request in begun.ask([prompt(1), prompt(1)])] == [1, 3, 4]
    begun.cut()
    begun.drop([prompt(3), prompt(3)])
    assert [request.token_ids[1] for request in begun.ask([])] == [4, 1]


def test_an_engine_may_report_no_token_and_a_version_without_one_does_not_count():
    begun, (request,) = begun_prompt(num_generations=1)
    begun.add(request.name, [], [], 1, None)
    begun.add(request.name, [5], [-1.0], 2, "length")
    completion = begun.drafts(prompt(1))[0].complete("")
    assert (completion.weight_version, completion.weight_updates) == (2, 0)
