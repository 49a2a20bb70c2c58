"""group_advantages against formulas written out by hand, for every `scale_rewards` and for NaN rewards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.algorithm.advantage import group_advantages

NAN = math.nan


def test_group_subtracts_the_mean_and_divides_by_the_sample_std_of_the_group():
    advantages = group_advantages([1.0, 0.0, 1.0, 0.0, 5.0, 5.0, 5.0, 5.0], 4, "group")
    std = math.sqrt(1 / 3)
    assert advantages.tolist() == pytest.approx([0.5 / (std + 1e-4), -0.5 / (std + 1e-4)] * 2 + [0.0] * 4)


def test_batch_divides_every_group_by_the_std_of_all_rewards():
    rewards = [1.0, 0.0, 3.0, 2.0]
    std = torch.tensor(rewards).std().item()
    assert group_advantages(rewards, 2, "batch").tolist() == pytest.approx(
        [0.5 / (std + 1e-4), -0.5 / (std + 1e-4)] * 2
    )


def test_none_only_subtracts_the_mean():
    assert group_advantages([1.0, 0.0, 3.0, 2.0], 2, "none").tolist() == [0.5, -0.5, 0.5, -0.5]


def test_nan_rewards_get_advantage_0_and_do_not_change_the_others():
    advantages = group_advantages([1.0, NAN, 0.0, NAN, NAN, NAN], 3, "group")
    std = math.sqrt(0.5)
    assert advantages.tolist() == pytest.approx([0.5 / (std + 1e-4), 0.0, -0.5 / (std + 1e-4), 0.0, 0.0, 0.0])


@given(
    groups=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=4, max_size=4), min_size=1, max_size=6),
    scale=st.sampled_from(["group", "batch", "none"]),
)
def test_advantages_are_finite_and_average_to_0_in_each_prompt_group(groups, scale):
    advantages = group_advantages([reward for group in groups for reward in group], 4, scale).view(-1, 4)
    assert advantages.isfinite().all()
    assert torch.allclose(advantages.sum(dim=1), torch.zeros(len(groups)), atol=1e-3)
