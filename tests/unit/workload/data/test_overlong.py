"""Asserts what becomes of prompts that are too long, and that a restart or other ranks change no step's prompts."""

import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data import scan as scanning
from grpo_workload.data.overlong import PromptLimit, prompt_limit
from grpo_workload.data.prompt_maker import PromptError
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.data.scan import scan
from support.trainer.step_settings import bare_settings

LIMIT = 10


def to_prompt(index, row):
    return Prompt(index=index, text="", token_ids=tuple(range(row["tokens"])))


def make_source(lengths, action):
    rows = [{"tokens": tokens} for tokens in lengths]
    return PromptSource(rows, to_prompt, seed=3, limit=PromptLimit(LIMIT, "generation.maxModelLen", action))


def scan_all(source, steps=range(100), ranks=1):
    found = [scan(source, share=range(rank, 4, ranks), prompts_per_step=4, steps=steps) for rank in range(ranks)]
    return max(longest.tokens for longest in found), all(longest.is_known for longest in found)


@given(
    lengths=st.lists(st.integers(1, 2 * LIMIT), min_size=2, max_size=30).filter(lambda tokens: min(tokens) <= LIMIT),
    steps=st.integers(1, 12),
    resume=st.integers(0, 11),
)
def test_skipped_rows_are_replaced_alike_in_every_process(lengths, steps, resume):
    source = make_source([*lengths, 1], "skip")
    whole = [source.batch(step, 4) for step in range(steps)]
    assert all(len(prompt.token_ids) <= LIMIT for batch in whole for prompt in batch)
    plain = make_source([*lengths, 1], "truncate")
    for step, batch in enumerate(whole):
        for position, prompt in enumerate(batch):
            draw = plain.draw(step, position, 4)
            was_too_long = [*lengths, 1][draw.index] > LIMIT
            assert prompt.is_overlong == was_too_long
            assert was_too_long or prompt.index == draw.index
            assert prompt.seed == draw.seed
    other = pickle.loads(pickle.dumps(source))  # as a worker or a later attempt, which begins at another step
    assert [other.batch(step, 4) for step in range(resume, steps)] == whole[resume:]


def test_truncation_keeps_the_end():
    (prompt,) = make_source([13], "truncate").batch(0, 1)
    assert (prompt.token_ids, prompt.is_overlong) == (tuple(range(3, 13)), True)
    (prompt,) = make_source([10], "truncate").batch(0, 1)
    assert (prompt.token_ids, prompt.is_overlong) == (tuple(range(10)), False)


MESSAGE = (
    r"prompt 2 of the dataset has 11 tokens; generation.maxModelLen less training.maxCompletionLength leaves 10: set "
    r"dataset.overlongPrompts to skip or truncate"
)


def test_a_prompt_leaves_room_for_its_completion():
    generation, training = {"engine": "Transformers", "maxModelLen": 128}, {"maxCompletionLength": 6}
    config = bare_settings("nowhere", "float32", generation=generation, training=training)
    assert prompt_limit(config, config.dataset) == PromptLimit(122, "generation.maxModelLen", "error")


def test_by_default_the_scan_finds_the_row_and_so_does_its_step():
    source = make_source([1, 10, 11, 2, 3], "error")
    with pytest.raises(PromptError, match=MESSAGE):
        scan_all(source)
    with pytest.raises(PromptError, match=MESSAGE):
        source.batch(0, 5)


@pytest.mark.parametrize("steps", [range(100), range(3, 99)], ids=["whole", "goes on in the middle of an epoch"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_scan_every_row_together(ranks, steps):
    scan_all(make_source([1] * 23, "error"), ranks=ranks, steps=steps)
    for place in range(23):
        source = make_source([1] * place + [11] + [1] * (22 - place), "error")
        with pytest.raises(PromptError, match=f"prompt {place} of the dataset"):
            scan_all(source, ranks=ranks, steps=steps)


def test_rows_that_no_step_uses_are_not_scanned():
    source = make_source([1] * 40, "error")
    used = {source.draw(step, position, 4).index for step in (2, 3) for position in range(4)}
    scan_all(make_source([1 if index in used else 11 for index in range(40)], "error"), steps=range(2, 4))


def test_a_scan_says_what_it_found_and_ends_in_time(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    scan_all(make_source([1, 19, 11, 2], "skip"))
    said = "overlongPrompts is skip: 2 of 4 rows for this rank have more than 10 tokens; the longest, row 1, has 19"
    assert said in caplog.text
    monkeypatch.setattr(scanning, "SCAN_SECONDS", -1.0)
    scan_all(make_source([11, 11], "error"))
    assert "the lengths of 0 rows are known; others are checked at their step" in caplog.text


def test_a_dataset_of_overlong_rows_alone_is_refused():
    with pytest.raises(PromptError, match="has 11 tokens"):
        make_source([11, 11], "skip").batch(0, 1)


def test_rows_that_are_changed_or_generated_are_not_scanned():
    source = make_source([1], "error")
    assert source.is_scannable
    assert not PromptSource([{}], to_prompt, seed=0, scorer=lambda *_: 1.0, limit=source.limit).is_scannable
    assert not PromptSource([{}], to_prompt, seed=0, preprocess=lambda *_: {}, limit=source.limit).is_scannable
    assert not PromptSource([{}], to_prompt, seed=0).is_scannable


def test_a_scan_finds_the_longest_prompt_that_is_trained_on(monkeypatch):
    assert scan_all(make_source([3, 9, 5, 1], "error"), ranks=2) == (9, True)
    assert scan_all(make_source([3, 13, 5, 1], "skip")) == (5, True)
    assert scan_all(make_source([3, 13, 5, 1], "truncate")) == (LIMIT, True)
    source = make_source([*range(1, 10), 3], "error")
    first_step = {prompt.index for prompt in source.batch(0, 4)}
    assert scan_all(source, steps=range(1)) == (max([*range(1, 10), 3][index] for index in first_step), True)
    monkeypatch.setattr(scanning, "SCAN_SECONDS", -1)
    assert scan_all(source) == (1, False)


def test_of_rows_that_may_be_slow_a_few_are_read():
    source, read = make_source([5] * 50, "error"), []
    source.scorer = lambda answer, prompt: 0.0
    source._to_prompt = lambda index, row: read.append(index) or to_prompt(index, row)
    assert scan_all(source) == (5, False)
    assert len(read) == scanning.FEW
