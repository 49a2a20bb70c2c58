"""PromptSource draws every row once an epoch, in an order that depends only on seed and step, and reads rows lazily;
ranks have even shares.

How prompts are made from rows: tests/trainer/data/test_datasets.py.
"""

from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.data.shard import shard


def make_source(num_rows, seed=0):
    rows = [{"prompt": str(index)} for index in range(num_rows)]
    return PromptSource(rows, lambda index, row: Prompt(index=index, text=row["prompt"], token_ids=(index,)), seed=seed)


def indices(source, steps, prompts_per_step):
    return [prompt.index for step in steps for prompt in source.batch(step, prompts_per_step)]


@given(num_rows=st.integers(1, 50), prompts_per_step=st.integers(1, 60), seed=st.integers(0, 2**31 - 1))
def test_every_epoch_contains_every_prompt_once(num_rows, prompts_per_step, seed):
    steps = range(3 * num_rows // prompts_per_step + 1)
    order = indices(make_source(num_rows, seed), steps, prompts_per_step)
    epochs = [order[start : start + num_rows] for start in range(0, len(order) - num_rows + 1, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)


@given(resume=st.integers(0, 20), prompts_per_step=st.integers(1, 12))
def test_a_resumed_run_sees_the_same_prompts_as_an_uninterrupted_one(resume, prompts_per_step):
    uninterrupted = indices(make_source(17), range(25), prompts_per_step)
    resumed = indices(make_source(17), range(resume, 25), prompts_per_step)
    assert uninterrupted[resume * prompts_per_step :] == resumed


@given(first_step=st.integers(0, 20), prompts_per_step=st.integers(1, 12))
def test_new_rows_begin_with_their_first_at_the_step_that_a_run_continues_with(first_step, prompts_per_step):
    source = make_source(17)
    source.first_step = first_step
    continued = indices(source, range(first_step, first_step + 5), prompts_per_step)
    assert continued == indices(make_source(17), range(5), prompts_per_step)
    assert source.batch(0, 1) == make_source(17).batch(0, 1), "what rewards are tried with"


def test_order_differs_by_epoch_and_by_seed():
    first, second = indices(make_source(50), [0], 50), indices(make_source(50), [1], 50)
    assert first != second
    assert first != indices(make_source(50, seed=1), [0], 50)


def test_rows_are_read_only_when_a_step_asks_for_them():
    read = []

    class Rows:
        def __len__(self):
            return 10_000_000

        def __getitem__(self, index):
            read.append(index)
            return {"prompt": ""}

    source = PromptSource(Rows(), lambda index, row: Prompt(index=index, text="", token_ids=()), seed=0)
    assert read == []
    source.batch(4, 3)
    assert len(read) == 3


@given(num_prompts=st.integers(1, 200), world_size=st.integers(1, 40))
def test_shards_cover_every_prompt_once_in_even_shares(num_prompts, world_size):
    shares = [shard(num_prompts, world_size, rank) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(num_prompts))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
