from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.seeds import prompt_seed, step_seed
from grpo_workload.tasks import PromptSource
from grpo_workload.types import Prompt

SEEDS = st.integers(0, 2**31 - 1)


def test_seeds_are_what_they_were_before() -> None:
    assert prompt_seed(42, 7, 3) == 4272836090866208229
    assert step_seed(42, 7) == 1955881634


@given(SEEDS, st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**4))
def test_prompts_of_a_step_have_seeds_of_their_own_that_a_server_takes(seed: int, step: int, one: int, other: int) -> None:
    assert 0 <= prompt_seed(seed, step, one) < 2**62
    assert (prompt_seed(seed, step, one) == prompt_seed(seed, step, other)) == (one == other)


def test_a_row_that_comes_again_is_sampled_anew() -> None:
    source = PromptSource([{}], lambda index, row: Prompt(index=index, text="?", token_ids=(1,)), seed=1)
    seeds = [prompt.seed for step in range(2) for prompt in source.batch(step, 3)]
    assert len(set(seeds)) == 6
    assert seeds[3:] == [prompt_seed(1, 1, position) for position in range(3)]
