"""The cut keeps the tokens that TRL's quantile keeps, whatever small errors entropies have when computed again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.policy.loss.entropy_cut import find_cut


@given(
    entropies=st.lists(st.integers(0, 100), min_size=1, max_size=30).map(lambda ones: [one / 8 for one in ones]),
    share=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.8, 1.0]),
    noise=st.integers(0, 100),
)
def test_it_keeps_what_the_quantile_keeps(entropies, share, noise):
    values = torch.tensor(entropies, dtype=torch.float64)
    # As long as the quantile is no rounded one: 1 - 0.8 is not 0.2.
    expected = values >= torch.quantile(values, 1 - share) - 1e-9
    cut = find_cut(values.float(), share)
    assert cut.num_tokens == int(expected.sum())
    assert torch.equal(values >= cut.threshold, expected)
    distinct = len(set(entropies)) == len(entropies)
    if distinct and len(entropies) > 1 and share < 1:
        error = 0.01 * torch.randn(len(values), generator=torch.Generator().manual_seed(noise)).clamp(-3, 3)
        assert torch.equal(values + error >= cut.threshold, expected)


def test_without_a_token_nothing_is_cut():
    assert find_cut(torch.empty(0), 0.2) == (0.0, 0)


def test_tokens_whose_entropies_are_equal_but_for_rounding_are_kept_together():
    """Such as the first tokens of completions of one prompt, by whose number the cut would else depend on rounding."""
    cut = find_cut(torch.tensor([1.0, 2.0, 2.000001, 1.999999, 3.0]), 0.4)
    assert cut.num_tokens == 4
    assert 1 < cut.threshold < 1.9
