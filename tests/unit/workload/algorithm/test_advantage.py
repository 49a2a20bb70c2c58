"""group_advantages against formulas written out by hand, for every `scale_rewards` and for NaN rewards."""

import math
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.advantage import (
    as_groups,
    group_advantages,
    is_flat,
    mean,
    reward_stds,
    std,
    step_advantages,
)

NAN = math.nan


def test_group_subtracts_the_mean_and_divides_by_the_sample_std_of_the_group():
    advantages = group_advantages([1.0, 0.0, 1.0, 0.0, 5.0, 5.0, 5.0, 5.0], 4, "group")
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages == pytest.approx([half, -half] * 2 + [0.0] * 4)


def test_batch_divides_every_group_by_the_std_of_all_rewards():
    half = 0.5 / (statistics.stdev([1.0, 0.0, 3.0, 2.0]) + 1e-4)
    assert group_advantages([1.0, 0.0, 3.0, 2.0], 2, "batch") == pytest.approx([half, -half] * 2)


def test_none_only_subtracts_the_mean():
    assert group_advantages([1.0, 0.0, 3.0, 2.0], 2, "none") == [0.5, -0.5, 0.5, -0.5]


def test_nan_rewards_get_advantage_0_and_do_not_change_the_others():
    advantages = group_advantages([1.0, NAN, 0.0, NAN, NAN, NAN], 3, "group")
    deviation = math.sqrt(0.5)
    assert advantages == pytest.approx([0.5 / (deviation + 1e-4), 0.0, -0.5 / (deviation + 1e-4), 0.0, 0.0, 0.0])


def test_rloo_subtracts_the_mean_of_the_others():
    advantages = group_advantages([1.0, 0.0, 0.5, NAN, 2.0, NAN, NAN, NAN, 3.0, 3.0, 3.0, 3.0], 4, "none", "rloo")
    assert advantages == pytest.approx([0.75, -0.75, 0] + [0] * 9)
    assert advantages[4:] == [0] * 8, "one alone, or equal ones, teach nothing"
    assert group_advantages([1.0, 0.0], 2, "none", "rloo") == [1, -1]


def test_reinforce_plus_plus_divides_by_the_std_of_the_differences():
    rewards = [1.0, 0.0, 9.0, 7.0, NAN, 4.0]
    differences = [0.5, -0.5, 1.0, -1.0, 0.0]  # of the one alone in its group, too
    deviation = statistics.stdev(differences) + 1e-4
    expected = [0.5 / deviation, -0.5 / deviation, 1 / deviation, -1 / deviation, 0, 0]
    assert group_advantages(rewards, 2, "batch", "reinforce_plus_plus") == pytest.approx(expected)
    for scale in ("group", "none"):
        assert group_advantages(rewards, 2, scale, "reinforce_plus_plus") == group_advantages(rewards, 2, scale)


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    """Each completion counts as often as it has tokens."""
    training = TrainingConfig(num_generations=2, advantage_estimator="reinforce_plus_plus_baseline")
    advantages = step_advantages([1.0, 0.0, 5.0, 5.0, NAN, 4.0], [], [], [1, 3, 2, 2, 9, 1], training)
    tokens = [0.5] + [-0.5] * 3 + [0.0] * 5
    average, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    expected = [(one - average) / deviation for one in (0.5, -0.5, 0.0, 0.0)]
    assert advantages == pytest.approx([*expected, 0, -average / deviation])
    assert advantages[4] == 0, "it has no reward"
    assert step_advantages([NAN, NAN], [], [], [3, 4], training) == [0, 0]
    two = step_advantages([1.0, 0.0], [], [], [1, 1], training)
    assert two == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-3), "the fewest that have a deviation"
    assert all(map(math.isfinite, step_advantages([1e200, -1e200], [], [], [3, 4], training)))


def test_each_reward_is_normalised_before_they_are_summed():
    training = TrainingConfig(num_generations=2, multi_objective_aggregation="normalize_then_sum")
    # The second function has a thousand times the range, and scores the first group only.
    values = [[1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 1000.0, None, None, None, None]]
    totals = [1.0, 500.0, 1.0, 1.0, 0.0, 1.0]
    half = math.sqrt(0.5)
    first = 0.5 / (half + 1e-4)
    both = first - 0.5 * 500 / (1000 * half + 1e-4)
    sums = [both, -both, 0, 0, -first, first]
    deviation = statistics.stdev(sums)
    tokens = [1] * 6
    advantages = step_advantages(totals, values, [1.0, 0.5], tokens, training)
    assert advantages == pytest.approx([value / (deviation + 1e-4) for value in sums])
    assert advantages[2:4] == [0, 0], "exactly: equal rewards are not trained on"
    assert step_advantages([NAN, *totals[1:]], values, [1.0, 0.5], tokens, training)[0] == 0


REWARDS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, NAN]), st.floats(-1e6, 1e6))
GROUPS = st.lists(st.lists(REWARDS, min_size=4, max_size=4), min_size=1, max_size=6)
SCALES = st.sampled_from(["group", "batch", "none"])


@pytest.mark.parametrize(
    ("rewards", "is_equal"),
    [
        ([0.3, 0.1 + 0.2], True),
        ([1e9, 1e9 + 1e-6, NAN], True),
        ([1.0, 1.0001], False),
        ([1e9, 1e9 + 1], False),
        ([5.0, NAN], False),
        ([NAN, NAN], False),
    ],
)
def test_rewards_are_equal_if_only_rounding_tells_them_apart(rewards, is_equal):
    """One alone is not counted, as in TRL's frac_reward_zero_std; its advantage is 0 all the same."""
    assert is_flat(rewards) == is_equal
    for scale in ("group", "batch", "none"):
        is_taught = any(group_advantages(rewards, len(rewards), scale))
        assert is_taught == (not is_equal and NAN not in rewards)


@given(groups=GROUPS, scale=SCALES)
def test_advantages_are_finite_and_average_to_0_in_each_prompt_group(groups, scale):
    advantages = group_advantages([reward for group in groups for reward in group], 4, scale)
    assert all(map(math.isfinite, advantages))
    for group in as_groups(advantages, 4):
        assert abs(sum(group)) <= 1e-9 * (1 + sum(map(abs, group)))


@given(value=st.floats(-1e30, 1e30), size=st.integers(2, 64), scale=SCALES, other=st.floats(-10, 10))
@example(value=0.1, size=3, scale="group", other=0.0)  # its mean in float32 is another number than 0.1
def test_equal_rewards_have_advantage_0_exactly(value, size, scale, other):
    advantages = group_advantages([value] * size + [other] * (size - 1) + [NAN], size, scale)
    assert advantages == [0.0] * 2 * size
    assert reward_stds([value] * size, size, scale) == [0.0]


@given(group=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16), random=st.randoms(), scale=SCALES)
def test_the_order_of_the_rewards_changes_no_bit(group, random, scale):
    """Ranks on unlike processors add up in other orders, and must still agree on what is 0."""
    order = list(range(len(group)))
    random.shuffle(order)
    advantages = group_advantages(group, len(group), scale)
    shuffled = group_advantages([group[place] for place in order], len(group), scale)
    assert shuffled == [advantages[place] for place in order]


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=False), max_size=8))
def test_means_and_deviations_of_any_numbers_do_not_raise(values):
    known = [value for value in values if not math.isnan(value)]
    assert math.isnan(mean(values)) if not known else min(known) <= mean(values) <= max(known)
    assert std(values) >= 0 or len(known) < 2 or max(map(abs, known)) > 1e300
