"""Asserts that seeds stay the same over releases, fit vLLM, and differ between prompts, epochs and ranks."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.ranks.seeds import prompt_seed, sample_seed, step_seed

SEEDS = st.integers(0, 2**31 - 1)


def test_seeds_do_not_change_between_releases():
    assert prompt_seed(42, 7, 3) == 4272836090866208229
    assert sample_seed(4272836090866208229, 1, 17) == 2270332122172509779
    assert [step_seed(42, 7, rank) for rank in range(2)] == [3022963095, 1820819976]


@given(SEEDS, st.integers(0, 10**6), st.integers(2, 512))
def test_ranks_draw_different_dropout_masks(seed, step, world_size):
    # Seeds of 32 bits may meet by chance, but never many of them.
    assert len({step_seed(seed, step, rank) for rank in range(world_size)}) >= world_size - 2


@given(SEEDS, st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**4))
def test_each_prompt_of_a_step_has_its_own_seed_that_vllm_accepts(seed, step, one, other):
    assert 0 <= prompt_seed(seed, step, one) < 2**62
    assert (prompt_seed(seed, step, one) == prompt_seed(seed, step, other)) == (one == other)


@given(st.integers(0, 2**62 - 1), *[st.integers(0, 2**20)] * 4)
def test_each_completion_has_its_own_seeds_before_and_after_a_cut(seed, a, b, c, d):
    assert 0 <= sample_seed(seed, a, b) < 2**62
    assert (sample_seed(seed, a, b) == sample_seed(seed, c, d)) == ((a, b) == (c, d))


def test_a_row_gets_another_seed_in_each_epoch():
    source = PromptSource([{}], lambda index, row: Prompt(index=index, text="?", token_ids=(1,)), seed=1)
    seeds = [prompt.seed for step in range(2) for prompt in source.batch(step, 3)]
    assert len(set(seeds)) == 6
    assert seeds[3:] == [prompt_seed(1, 1, position) for position in range(3)]
