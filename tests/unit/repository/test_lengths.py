"""Asserts that a prompt's completions get the same lengths however vLLM is asked for them, also after interruptions."""

from types import SimpleNamespace
from typing import Any

from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS, Imposer, Lengths, lengths, prompt

LENGTHS = Lengths(kind="lognormal")
PROMPT = [7] * PROMPT_TOKENS


def _request(name: str, token_ids: list[int], max_tokens: int = 2048) -> Any:
    tokens = {"prompt_token_ids": token_ids, "all_token_ids": list(token_ids), "max_tokens": max_tokens}
    sampling = SimpleNamespace(max_tokens=max_tokens, stop_token_ids=[5], _eos_token_id=9)
    return SimpleNamespace(request_id=name, sampling_params=sampling, **tokens)


def _imposed(imposer: Imposer, name: str, token_ids: list[int]) -> Any:
    request = _request(name, token_ids)
    imposer.impose(request)
    return request


def _sample(request: Any, *token_ids: int) -> None:
    request.all_token_ids += token_ids


def test_the_prompts_of_a_step_have_all_lengths_of_a_step() -> None:
    texts = [prompt(3, position).encode() for position in range(NUM_PROMPTS)]
    assert {len(text) for text in texts} == {PROMPT_TOKENS}
    assert sorted(length for text in texts for length in LENGTHS.of(text)) == sorted(lengths("lognormal"))
    assert LENGTHS.of(texts[0]) == LENGTHS.of(prompt(4, 0).encode())
    assert Lengths(kind="equal", scale=0.5).of(PROMPT) == [256] * NUM_GENERATIONS


def test_samples_of_one_request_get_them_in_order_whenever_they_arrive() -> None:
    imposer = Imposer(LENGTHS)
    requests = {place: _imposed(imposer, f"{place}_cmpl-1-0-ab", PROMPT) for place in (2, 0, 1, 4, 3, 5, 7, 6)}
    assert [requests[place].max_tokens for place in range(NUM_GENERATIONS)] == LENGTHS.of(PROMPT)
    assert requests[0].sampling_params._eos_token_id is None
    assert requests[0].sampling_params.stop_token_ids == []


def test_requests_for_single_samples_get_them_in_order_of_arrival() -> None:
    imposer = Imposer(LENGTHS)
    assert [_imposed(imposer, name, PROMPT).max_tokens for name in "abcdefgh"] == LENGTHS.of(PROMPT)


def test_a_continued_completion_keeps_its_length() -> None:
    imposer = Imposer(LENGTHS)
    first = [_imposed(imposer, f"{place}_1-a", PROMPT) for place in range(NUM_GENERATIONS)]
    _sample(first[1], 40, 41)
    _sample(first[2], 50)
    again = _imposed(imposer, "9-b", [*PROMPT, 40])  # its last token was not delivered
    assert again.max_tokens == LENGTHS.of(PROMPT)[1] - 1
    _sample(again, 42)
    assert _imposed(imposer, "10-b", [*PROMPT, 40, 42]).max_tokens == LENGTHS.of(PROMPT)[1] - 2
    assert _imposed(imposer, "11-b", PROMPT).max_tokens == LENGTHS.of(PROMPT)[0]  # the one without a token


def test_the_check_of_weights_keeps_its_single_token() -> None:
    request = _request("3-a", [*PROMPT, 40], max_tokens=1)
    Imposer(LENGTHS).impose(request)
    assert request.max_tokens == 1
    assert request.sampling_params._eos_token_id == 9


def test_completions_that_were_cut_before_their_first_token_keep_their_lengths() -> None:
    imposer = Imposer(LENGTHS)
    first = [_imposed(imposer, f"begun-{number}-a", PROMPT) for number in range(NUM_GENERATIONS)]
    _sample(first[0], 40)
    asked = [[*PROMPT, 40], *[PROMPT] * (NUM_GENERATIONS - 1)]
    again = [_imposed(imposer, f"begun-{number}-b", token_ids) for number, token_ids in enumerate(asked)]
    assert [one.max_tokens + len(one.prompt_token_ids) - PROMPT_TOKENS for one in again] == LENGTHS.of(PROMPT)
    _sample(again[2], 60)
    assert _imposed(imposer, "begun-7-c", PROMPT).max_tokens == LENGTHS.of(PROMPT)[1]
