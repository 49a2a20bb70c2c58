"""grpo_loss adds up over any split into micro-batches and ranks, ignores masked tokens, and clips and counts ratios.

What a loss is divided by is written out by hand. Next to TRL: tests/trainer/training/test_trl_parity.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import EntropyCut, LossScale, grpo_loss, token_means

VARIANTS = [
    {"loss_type": "grpo"},
    {"loss_type": "dapo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "bnpo", "delta": 1.5},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "sapo"},
    {"loss_type": "gmpo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
]


def make_batch(seed, num_sequences=7, num_tokens=5):
    """Random float64 tensors; some sequences are short, and the first is masked completely."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, num_tokens + 1, (num_sequences,), generator=generator)
    mask = (torch.arange(num_tokens) < lengths.unsqueeze(1)).double()
    mask[0] = 0
    logprobs = -rand(num_sequences, num_tokens).abs()
    noise = 0.5 * rand(num_sequences, num_tokens)
    return logprobs, logprobs + noise, rand(num_sequences), mask, logprobs - 0.3 * noise


def loss_of(batch, rows, scale, training):
    logprobs, old, advantages, mask, ref = (tensor[rows] for tensor in batch)
    ref = ref if training.beta else None
    return grpo_loss(logprobs, old, advantages, mask, scale=scale, training=training, ref_logprobs_BT=ref)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    owner=st.lists(st.integers(0, 5), min_size=7, max_size=7),
    variant=st.sampled_from(VARIANTS),
    beta=st.sampled_from([0.0, 0.04]),
)
def test_any_split_into_micro_batches_and_ranks_adds_up_to_the_whole(seed, owner, variant, beta):
    training = TrainingConfig(**{"epsilon_high": 0.28, "beta": beta, "max_completion_length": 5} | variant)
    whole, parts = make_batch(seed), make_batch(seed)
    scale = LossScale(num_sequences=7, num_tokens=int(whole[3].sum()))
    whole[0].requires_grad_()
    parts[0].requires_grad_()

    expected = loss_of(whole, slice(None), scale, training)
    outputs = [loss_of(parts, torch.tensor(owner) == place, scale, training) for place in set(owner)]
    expected.loss.backward()
    for output in outputs:
        output.loss.backward()

    assert sum(output.loss.item() for output in outputs) == pytest.approx(expected.loss.item(), abs=1e-6)
    assert torch.allclose(parts[0].grad, whole[0].grad, atol=1e-6)
    for name, total in expected.metrics.items():
        assert sum(output.metrics[name].item() for output in outputs) == pytest.approx(total.item(), abs=1e-6)


MASK = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])  # of 4 completions: one is on another rank


def plain_loss(scale, entropies=None, kept=None, **options):
    """The loss of completions with advantages 1, -2 and 9 whose ratios are 1."""
    logprobs, advantages = torch.full((3, 4), -1.0), torch.tensor([1.0, -2, 9])
    given = {"scale": scale, "training": TrainingConfig(max_completion_length=10, **options), "kept_B1": kept}
    entropy = None if entropies is None else torch.tensor(entropies)
    return grpo_loss(logprobs, logprobs, advantages, MASK, entropy_BT=entropy, **given)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "dapo"}, (-4 + 2) / 8),
        ({"loss_type": "bnpo"}, (-4 + 2) / 5),
        ({"loss_type": "grpo"}, (-1 + 2) / 4),
        ({"loss_type": "gmpo"}, (-1 + 2) / 4),
        ({"loss_type": "dr_grpo"}, (-4 + 2) / (4 * 10)),
        ({"loss_type": "dapo", "kept": torch.tensor([[1.0], [0], [1]])}, -4 / 8),
    ],
)
def test_each_loss_is_divided_by_what_its_paper_says(options, expected):
    output = plain_loss(LossScale(num_sequences=4, num_tokens=5, mean_tokens=8.0), **options)
    assert output.loss.item() == pytest.approx(expected)
    if "kept" in options:
        assert output.metrics["trained/sampling/off_policy_mask/masked_fraction"] == 1, "a sum over tokens"
    alone = plain_loss(LossScale(num_sequences=4, num_tokens=0), loss_type=options["loss_type"])
    assert math.isfinite(alone.loss), "no token of the step is in the loss"


def test_the_kl_divergence_is_added():
    logprobs, ref = torch.full((1, 2), -1.0), torch.full((1, 2), -1.0 + math.log(2))
    options = {"scale": LossScale(num_sequences=1, num_tokens=2), "training": TrainingConfig(beta=0.5)}
    loss = grpo_loss(logprobs, logprobs, torch.tensor([1.0]), torch.ones(1, 2), ref_logprobs_BT=ref, **options).loss
    assert loss.item() == pytest.approx(-1 + 0.5 * (2 - math.log(2) - 1))


def test_the_cut_keeps_tokens_of_high_entropy_and_their_mean_entropy_is_subtracted():
    entropies = [[0.5, 1.0, 2.0, 3.0], [1.5, 9, 9, 9], [9, 9, 9, 9]]  # those of padding do not count
    scale = LossScale(num_sequences=4, num_tokens=5)
    every = plain_loss(scale, entropies, entropy_coef=0.1)
    assert every.loss.item() == pytest.approx((-4 + 2) / 5 - 0.1 * 8 / 5)
    assert every.metrics["trained/entropy"] == 8
    cut = LossScale(num_sequences=4, num_tokens=5, entropy_cut=EntropyCut(threshold=1.5, num_tokens=3))
    chosen = plain_loss(cut, entropies, entropy_coef=0.1)
    assert chosen.loss.item() == pytest.approx((-2 + 2) / 5 - 0.1 * (2 + 3 + 1.5) / 3)
    assert chosen.metrics["trained/entropy"] == 8, "the metric is of all tokens"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_masked_completely_gives_loss_0_and_gradients_0(variant):
    logprobs = torch.zeros(1, 3, requires_grad=True)
    garbage = torch.full((1, 3), -math.inf)
    output = grpo_loss(
        logprobs,
        garbage,
        torch.tensor([1.0]),
        torch.zeros(1, 3),
        scale=LossScale(num_sequences=4, num_tokens=0),
        training=TrainingConfig(beta=0.1, entropy_coef=0.1, max_completion_length=3, **variant),
        ref_logprobs_BT=garbage,
        entropy_BT=garbage,
    )
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs.grad.tolist() == [[0, 0, 0]]
    assert all(value.item() == 0 for value in output.metrics.values())


def gradients(ratios, advantage, **options):
    """Gradient of the loss by the log-probability of each token: a row of one completion."""
    logprobs = torch.tensor([ratios]).log().requires_grad_()
    scale = LossScale(num_sequences=1, num_tokens=len(ratios))
    zeros, ones, advantages = torch.zeros_like(logprobs), torch.ones_like(logprobs), torch.tensor([advantage])
    output = grpo_loss(logprobs, zeros, advantages, ones, scale=scale, training=TrainingConfig(**options))
    output.loss.backward()
    return logprobs.grad[0] * len(ratios), {name: value.item() for name, value in output.metrics.items()}


@pytest.mark.parametrize(
    ("advantage", "is_clipped", "metric"),
    [(1.0, [False, False, False, True], "high_mean"), (-1.0, [True, False, False, False], "low_mean")],
)
def test_clipped_tokens_get_no_gradient_and_are_counted(advantage, is_clipped, metric):
    gradient, sums = gradients([0.5, 1.0, 1.25, 2.0], advantage, epsilon=0.2, epsilon_high=0.3)
    assert (gradient == 0).tolist() == is_clipped
    expected = dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean"), 0) | {"clip_ratio/region_mean": 1 / 4}
    assert token_means(sums, 4) == expected | {f"clip_ratio/{metric}": 1 / 4}


def test_delta_bounds_the_ratio_where_the_advantage_is_negative():
    ratios = [1.0, 3.0, 30.0]
    assert gradients(ratios, -1.0)[0].tolist() == pytest.approx(ratios)
    assert gradients(ratios, -1.0, delta=4.0)[0].tolist() == pytest.approx([1, 3, 0])
    assert torch.equal(gradients(ratios, 1.0)[0], gradients(ratios, 1.0, delta=4.0)[0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    gradient, metrics = gradients([0.5, 1.0, 30.0], 1.0, loss_type="cispo", epsilon_high=5.0)
    assert gradient.tolist() == pytest.approx([-0.5, -1, -5])
    assert metrics["cispo_clip_ratio"] == 1


def test_sapo_fades_as_the_ratio_leaves_1():
    gradient, metrics = gradients([1.0, 2.0, 8.0], 1.0, loss_type="sapo", sapo_temperature_pos=2.0)
    sigmoids = [1 / (1 + math.exp(-2 * (ratio - 1))) for ratio in (1.0, 2.0, 8.0)]
    expected = [-4 * s * (1 - s) * ratio for s, ratio in zip(sigmoids, (1.0, 2.0, 8.0), strict=True)]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics == {"num_tokens": 3}


@pytest.mark.parametrize(
    ("advantage", "clipped", "metric"),
    [(2.0, [0.1, -1.0, 0.5], "clip_ratio/high_mean"), (-2.0, [0.1, -0.4, 1.5], "clip_ratio/low_mean")],
)
def test_gmpo_trains_on_the_geometric_mean_of_clipped_ratios(advantage, clipped, metric):
    log_ratios = [0.1, -1.0, 1.5]
    gradient, metrics = gradients(
        [math.exp(one) for one in log_ratios], advantage, loss_type="gmpo", epsilon=0.4, epsilon_high=0.5
    )
    mean = math.exp(sum(clipped) / 3)
    kept = [one == bounded for one, bounded in zip(log_ratios, clipped, strict=True)]
    assert gradient.tolist() == pytest.approx([-advantage * mean * one for one in kept])
    assert metrics[metric] == metrics["clip_ratio/region_mean"] == 1


def test_a_kl_divergence_in_the_reward_is_not_in_the_loss():
    plain, _ = gradients([0.9, 1.1], 1.0)
    penalised, metrics = gradients([0.9, 1.1], 1.0, beta=0.5, kl_in_reward=True)
    assert torch.equal(plain, penalised)
    assert "kl" not in metrics
    assert not TrainingConfig(beta=0.5, kl_in_reward=True).trains_advantage_0


def test_with_ratios_of_sequences_all_tokens_are_clipped_or_none():
    steady, _ = gradients([0.5, 2.0, 1.1], 1.0, loss_type="grpo", importance_sampling_level="sequence")
    assert steady.tolist() == pytest.approx([-(1.1 ** (1 / 3))] * 3)
    clipped, metrics = gradients([0.5, 4.0, 1.1], 1.0, loss_type="grpo", importance_sampling_level="sequence")
    assert clipped.tolist() == [0, 0, 0]
    assert metrics["clip_ratio/high_mean"] == 3, "one sequence of one: a mean of 1 over its tokens"
    old, now = torch.zeros(2, 3), torch.tensor([[0.9, 0.9, 0.9], [0, 0, 0]])
    scale, mask = LossScale(num_sequences=2, num_tokens=4), torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    training = TrainingConfig(loss_type="grpo", importance_sampling_level="sequence")
    sums = grpo_loss(now, old, torch.ones(2), mask, scale=scale, training=training).metrics
    assert sums["clip_ratio/high_mean"] / 4 == 0.5, "one sequence of two, whatever their lengths"


def test_trls_means_count_tokens_that_the_model_was_not_run_on():
    sums = {"num_tokens": 4.0, "clip_ratio/low_mean": 1.0, "trained/entropy": 6.0}
    assert token_means(sums, 8) == {"clip_ratio/low_mean": 1 / 8, "trained/entropy": 6 / 4}


def test_a_mean_over_no_token_is_left_out():
    sums = {"num_tokens": 0.0, "clip_ratio/low_mean": 0.0, "trained/entropy": 0.0}
    assert token_means(sums, 8) == {"clip_ratio/low_mean": 0.0}
    assert token_means(sums, 0) == {}


@pytest.mark.parametrize("variant", [{"importance_sampling_level": "sequence"}, {"loss_type": "gmpo"}])
def test_weights_of_tokens_multiply_a_loss_of_sequences_by_their_mean(variant):
    """So the default correction does not vanish with the length of a completion there, either."""
    training = TrainingConfig(**{"loss_type": "grpo"} | variant)
    logprobs, old, advantages, mask, _ = (tensor[1:] for tensor in make_batch(1))
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    means = (weights * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    scale, found = LossScale(num_sequences=6, num_tokens=int(mask.sum())), []
    for factors in (weights, means):
        trained = logprobs.clone().requires_grad_()
        one = grpo_loss(trained, old, advantages, mask, scale=scale, training=training, weights_BT=factors)
        one.loss.backward()
        found.append((one.loss.detach(), trained.grad))
    torch.testing.assert_close(found[0], found[1])
