"""Prompts are shared evenly among ranks."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.data.shard import shard


@given(num_prompts=st.integers(1, 200), world_size=st.integers(1, 40))
def test_shards_cover_every_prompt_once_in_even_shares(num_prompts, world_size):
    shares = [shard(num_prompts, world_size, rank) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(num_prompts))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
