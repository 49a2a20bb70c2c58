"""All ranks have equally many micro-batches, which hold all tokens of the plan; fillers make up for missing ones."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.step_plan import Fact, plan
from grpo_workload.training.exchange import micro_batches
from support.trainer.samples import make_sample


def fact(tokens=4, *, advantage=0.5):
    return Fact(prompt_tokens=2, tokens=tokens, is_truncated=False, reward=1.0, advantage=advantage)


@given(tokens=st.lists(st.lists(st.integers(1, 1000), max_size=9), min_size=1, max_size=8), budget=st.integers(1, 1500))
def test_all_ranks_have_equally_many_micro_batches(tokens, budget):
    training = TrainingConfig(max_tokens_per_micro_batch=budget)
    work = plan([[fact(count) for count in own] for own in tokens], training)
    for rank in range(len(tokens)):
        # Only where no sample moves: then micro_batches needs no collective.
        if all(piece.owner == owner for owner, bins in enumerate(work.bins) for pieces in bins for piece in pieces):
            batches = list(micro_batches(work, [make_sample((1, 1), (7,) * count) for count in tokens[rank]], rank))
            assert len(batches) == work.num_micro_batches
            assert sum(batch.num_tokens for batch in batches) == work.fed_tokens(rank)
            assert sum(batch.num_tokens for batch in batches if batch.mask_BC.any()) == sum(
                count + 2 for count in tokens[rank]
            )


def test_a_step_without_gradients_is_a_filler():
    training = TrainingConfig()
    work = plan([[fact(advantage=0.0)], []], training)
    (batch,) = micro_batches(work, [], 1)
    assert not batch.mask_BC.any()
