"""Asserts that an engine's requests get the recorded turns of their episodes, in whatever order they come."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from benchmarks.common.scripted import MEASURED, Prompter, Script, question, times
from benchmarks.vs_trl.agents_tool import query

from support.trainer.tiny_model import make_tiny_tokenizer

SCRIPT, TOKENIZER = Script(latency=1.0), make_tiny_tokenizer()
NUM_EPISODES = 64
NOISE = 200


class _Logprobs(NamedTuple):
    logprob_token_ids: Any
    cu_num_generated_tokens: Any = None


class _Request(SimpleNamespace):
    num_output_tokens = property(lambda request: len(request.output))

    def is_finished(self) -> bool:
        return False


def _request(name: str, text: str, max_tokens: int = 2048) -> _Request:
    return _Request(request_id=name, prompt_token_ids=TOKENIZER.encode(text), max_tokens=max_tokens, output=[])


def _sampled(prompter: Prompter, *requests: _Request) -> str:
    """Let all requests sample noise until the last one has its turn; return the last one's turn."""
    names = [one.request_id for one in requests]
    while requests[-1].output[-1:] != [TOKENIZER.eos_token_id]:
        output = SimpleNamespace(
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[NOISE] for _ in names],
            logprobs=_Logprobs(np.full((len(names), 1), NOISE)),
        )
        prompter.speaks(dict(zip(names, requests, strict=True)), names, output)
        for one, tokens, logged in zip(
            requests, output.sampled_token_ids, output.logprobs.logprob_token_ids, strict=True
        ):
            assert tokens == [*logged]
            one.output += tokens
    return str(TOKENIZER.decode(requests[-1].output))


@pytest.fixture
def prompter(tmp_path: Path) -> Prompter:
    SCRIPT.variables(tmp_path / "plugin", TOKENIZER)
    return Prompter(tmp_path / "plugin")


def test_turns_have_their_lengths_and_calls_that_the_tool_answers() -> None:
    assert len(SCRIPT.lengths) == NUM_EPISODES
    assert {len(turns) for turns in SCRIPT.lengths} == {2, 3}
    for sample, turns in enumerate(SCRIPT.lengths[8:16]):
        for number, length in enumerate(turns):
            text = SCRIPT.turn(MEASURED + 1, sample, number)
            assert len(TOKENIZER.encode(text)) == length
            calls = re.findall(r"<tool_call>\n(.*)\n</tool_call><\|im_end\|>$", text)
            assert len(calls) == (number < len(turns) - 1)
            for call in map(json.loads, calls):
                assert call["arguments"]["milliseconds"] == SCRIPT.milliseconds[8 + sample][number] > 0
                asked = f"{MEASURED + 1}{sample}{number}"
                assert query(call["arguments"]["sql"], 0) == f"item {asked}"
    assert '"milliseconds": 0}' in SCRIPT.turn(1, 0, 0), "calls of the warmup take no time"


def test_requests_get_the_turns_of_their_episodes(prompter: Prompter) -> None:
    (asked,) = question(1, 2, 1)
    first, second = (_request(name, asked["content"]) for name in "ab")
    prompter.begins(first)
    prompter.begins(second)
    turn = _sampled(prompter, first, second)
    assert turn == SCRIPT.turn(MEASURED + 2, 1, 0)
    assert TOKENIZER.decode(first.output).startswith(SCRIPT.turn(MEASURED + 2, 0, 0)[:100])
    later = _request("c", f"{asked['content']}{turn}\nitem 1210")
    prompter.begins(later)
    assert _sampled(prompter, later) == SCRIPT.turn(MEASURED + 2, 1, 1)


def test_a_check_of_weights_samples_what_it_samples(prompter: Prompter) -> None:
    check = _request("a", "any text", max_tokens=1)
    prompter.begins(check)
    output = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[NOISE]], logprobs=None)
    prompter.speaks({"a": check}, ["a"], output)
    assert output.sampled_token_ids == [[NOISE]]


def test_a_step_begins_with_its_first_request_and_ends_with_its_last_turn(prompter: Prompter, tmp_path: Path) -> None:
    for step in range(2):
        for place, turns in enumerate(SCRIPT.lengths):
            (asked,) = question(step, place // 8, 1)
            begun, ended = times(tmp_path / "plugin")
            assert (len(begun), len(ended)) == (step + (place > 0), step)
            text = asked["content"]
            for number in range(len(turns)):
                request = _request(f"{step}-{place}-{number}", text)
                prompter.begins(request)
                text += _sampled(prompter, request)
    begun, ended = times(tmp_path / "plugin")
    assert len(begun) == len(ended) == 2
    assert begun[0] < ended[0] <= begun[1] < ended[1]


def test_a_turn_has_no_space_that_a_parser_would_cut() -> None:
    for number, turns in enumerate(SCRIPT.lengths):
        for turn in range(len(turns)):
            said = re.split(r"\n<tool_call>|<\|im_end\|>", SCRIPT.turn(number // 8, number % 8, turn))[0]
            assert said == said.strip(), "a trainer that renders turns again would see other tokens"
