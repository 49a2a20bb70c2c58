"""Log-probabilities, entropies and gradients by slices of the vocabulary equal those from whole logits."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.logprobs.logprobs import logprobs_and_entropies
from grpo_workload.policy.model.logit_change import LogitChange
from support.families import make_model

pytestmark = pytest.mark.usefixtures("small_slices")


CHANGES = [LogitChange(), LogitChange(scale=0.25), LogitChange(softcap=3.0), LogitChange(scale=0.5, softcap=2.0)]


def whole_logits(hidden, weight, bias, change):
    logits = change.scale * torch.nn.functional.linear(hidden, weight, bias)
    return logits if change.softcap is None else change.softcap * (logits / change.softcap).tanh()


def expected(hidden, weight, bias, change, temperature):
    return torch.distributions.Categorical(logits=whole_logits(hidden, weight, bias, change) / (temperature or 1.0))


def truncated(logits, targets, truncation):
    """The log-probabilities under the truncation, from whole logits: what is left out is no part of the softmax."""
    kept = truncation.kept(logits).scatter(1, targets.unsqueeze(1), True)
    scaled = (logits / truncation.temperature).masked_fill(~kept, -torch.inf)
    return scaled.log_softmax(dim=1).gather(1, targets.unsqueeze(1)).squeeze(1)


TRUNCATIONS = st.builds(
    Truncation,
    temperature=st.sampled_from([0.6, 1.0, 5.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    top_k=st.sampled_from([0, 1, 20, 300]),
    top_p=st.sampled_from([1e-6, 0.7, 1.0]),
)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([1.0, 0.6, 0.0]),
    truncation=st.none() | TRUNCATIONS,
    has_bias=st.booleans(),
    change=st.sampled_from(CHANGES),
    with_entropy=st.booleans(),
)
def test_values_and_gradients_equal_those_from_whole_logits(
    seed, temperature, truncation, has_bias, change, with_entropy
):
    random = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=random).requires_grad_() for shape in ((7, 16), (257, 16), (257,))
    )
    # Most targets are not kept: then they are added to what is kept.
    targets, pulls = torch.randint(0, 257, (7,), generator=random), torch.randn(3, 7, generator=random)
    parameters, own_bias = [hidden, weight, *([bias] if has_bias else [])], bias if has_bias else None
    temperature = temperature if truncation is None else truncation.temperature
    whole = expected(hidden, weight, own_bias, change, temperature)
    wanted = [whole.log_prob(targets), whole.entropy()]
    if truncation is not None:
        kept = truncated(whole_logits(hidden, weight, own_bias, change), targets, truncation)
        wanted = [kept, whole.entropy(), whole.log_prob(targets)]
    count, atol = len(wanted) if with_entropy else 1, 1e-5 if truncation is None else 1e-4
    gradients = torch.autograd.grad((torch.stack(wanted) * pulls[: len(wanted)])[:count].sum(), parameters)

    values = logprobs_and_entropies(
        hidden, weight, own_bias, targets, temperature, truncation, change, trains_entropy=with_entropy
    ).T
    torch.testing.assert_close(values, torch.stack(wanted), atol=atol, rtol=1e-5)
    ours = torch.autograd.grad((values * pulls[: len(wanted)])[:count].sum(), parameters)
    for one, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2 * atol, rtol=10 * atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_truncated_probabilities_of_what_is_kept_add_up_to_1_in_half_precision(dtype):
    """Forward and backward pass agree on the kept words, although each computes the logits anew."""
    random = torch.Generator().manual_seed(1)
    row, weight = ((torch.randn(count, 64, generator=random) * size).to(dtype) for count, size in ((1, 0.2), (1000, 1)))
    truncation = Truncation(0.7, top_k=50, top_p=0.9)
    (words,) = truncation.kept(row @ weight.T).nonzero(as_tuple=True)[1:]
    weight.requires_grad_()
    values = logprobs_and_entropies(row.expand(len(words), -1), weight, None, words, 0.7, truncation)
    assert 1 < len(words) <= 60
    assert float(values[:, 0].detach().exp().sum()) == pytest.approx(1, abs=1e-5)
    values[:, 0].sum().backward()
    assert weight.grad.nonzero()[:, 0].unique().tolist() == words.tolist()


def test_half_precision_is_added_up_in_float32():
    random = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 64, generator=random).bfloat16(), torch.randn(1000, 64, generator=random).bfloat16()
    targets = torch.randint(0, 1000, (9,), generator=random)
    values = logprobs_and_entropies(hidden, weight, None, targets, 1.0)
    assert values.dtype == torch.float32
    whole = torch.distributions.Categorical(logits=(hidden @ weight.T).float())
    torch.testing.assert_close(values[:, 0], whole.log_prob(targets), atol=1e-5, rtol=0)


def test_frozen_weights_get_no_gradient():
    hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(6, 4)
    logprobs_and_entropies(hidden, weight, None, torch.tensor([0, 5]), 1.0)[:, 0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("llama", False), ("gemma2", True)])
def test_gradients_of_a_model_with_tied_or_untied_output_layer(family, is_tied):
    """Also of one that changes its logits."""
    model = make_model(family, vocab_size=259, tie_word_embeddings=is_tied)
    ids, places = torch.randint(0, 259, (1, 12)), torch.tensor([2, 3, 7])
    targets, config = ids[0, places + 1], model.config.to_dict()
    logits = model(input_ids=ids).logits
    whole = logits[0, places].log_softmax(-1).gather(1, targets.unsqueeze(1)).sum()
    gradients = torch.autograd.grad(whole, list(model.parameters()))

    head = LogprobHead(model)
    with head.targets(places, targets, 1.0):
        values = model(input_ids=ids).logits
    assert values.shape == (3, 2)
    for ours, theirs in zip(torch.autograd.grad(values[:, 0].sum(), list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert torch.equal(model(input_ids=ids).logits, logits), "outside `targets` the model returns its own"
    assert model.config.to_dict() == config


KERNELS = """
import torch
from grpo_workload.policy.logprobs import fold_plain, fold_triton
fold_triton.BLOCK = 64
torch.manual_seed(0)
state, plain_state = (torch.zeros(4, 5) for _ in range(2))
state[0] = plain_state[0] = -torch.inf
whole, targets = 3 * torch.randn(5, 250), torch.tensor([0, 99, 100, 249, 130])
for start in (0, 100, 200):
    part = whole[:, start : start + 100].contiguous()
    fold_triton.fold(part, targets - start, 0.7, state)
    fold_plain.fold(part, targets - start, 0.7, plain_state)
torch.testing.assert_close(state, plain_state, atol=1e-4, rtol=1e-5)
lse, gradient = state[0] + state[1].log(), torch.randn(5)
whole[2, 7] = -torch.inf
for entropy in (None, (torch.rand(5), torch.randn(5))):
    for start in (0, 100, 200):
        ours, plain = whole[:, start : start + 100].clone(), whole[:, start : start + 100].clone()
        fold_triton.unfold(ours, targets - start, lse, gradient, 0.7, entropy)
        fold_plain.unfold(plain, targets - start, lse, gradient, 0.7, entropy)
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
from grpo_workload.weights import digest, digest_kernel
from support.trainer.plain_digest import plain_order
for dtype, count in ((torch.bfloat16, 101), (torch.float16, 100), (torch.float32, 40_000), (torch.float64, 33)):
    values = torch.randn(count).to(dtype)
    wide, words = digest.wide(values), digest.words(values)
    order, rest = plain_order(wide), list(digest.any_order(words))
    assert digest_kernel.digest_on_gpu(wide, words).tolist() == [order, *rest]
    assert digest_kernel.digest_on_gpu(wide, None).tolist() == [order, 0, 0]
"""


def test_the_triton_kernels_compute_the_same():
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", KERNELS], check=True, env=environ)
