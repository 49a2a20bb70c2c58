"""Log-probabilities and gradients under penalties equal those from whole logits and the tokens before, counted one by
one, by vLLM's formula (`apply_penalties` in vllm/model_executor/layers/utils.py)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.samples import Episode
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.logprobs.logprobs import logprobs_and_entropies
from grpo_workload.policy.model.logit_change import LogitChange
from support.families import make_model
from support.trainer.samples import make_sample

pytestmark = pytest.mark.usefixtures("small_slices")

VOCABULARY = 257
LENGTHS = ((4, 9), (1, 1), (6, 14), (3, 5))  # of prompts and completions


def make_samples(random, words):
    """Samples whose tokens are from few words, so that most come again."""
    for prompt, completion in LENGTHS:
        ids = words[torch.randint(0, len(words), (prompt + completion,), generator=random)].tolist()
        yield make_sample(ids[:prompt], ids[prompt:])


def penalised(logits_KV, samples, penalties):
    """The logits of all completion tokens under penalties."""
    rows = []
    for sample in samples:
        for place in sample.completion.own_places:
            logits_V, own = logits_KV[len(rows)], list(sample.completion.token_ids[:place])
            factors, less = torch.ones(VOCABULARY), torch.zeros(VOCABULARY)
            for word in {*sample.prompt.token_ids, *own}:
                factors[word] = 1 / penalties.repetition if logits_V[word] > 0 else penalties.repetition
                less[word] = penalties.frequency * own.count(word) + penalties.presence * (word in own)
            rows.append(logits_V * factors - less)
    return torch.stack(rows)


PENALTIES = [Penalties(*of) for of in ((1.3, 0.0, 0.0), (1.0, 0.4, 0.0), (1.0, 0.0, 0.7), (0.8, -0.5, 0.3))]


@given(
    seed=st.integers(0, 10**6),
    penalties=st.sampled_from(PENALTIES),
    truncation=st.sampled_from([None, Truncation(0.7, top_k=20), Truncation(0.7, min_p=0.05, top_p=0.8)]),
    change=st.sampled_from([LogitChange(), LogitChange(scale=0.5, softcap=2.0)]),
)
def test_values_and_gradients_equal_those_from_whole_logits(seed, penalties, truncation, change):
    random = torch.Generator().manual_seed(seed)
    samples = list(make_samples(random, torch.tensor([0, 5, 103, 104, 207, 208, 256])))
    batch = micro_batch(samples)
    count = len(batch.targets_K)
    hidden, weight = (torch.randn(*shape, generator=random).requires_grad_() for shape in ((count, 16), (257, 16)))
    pulls = torch.randn(3, count, generator=random)
    logits = change.scale * hidden @ weight.T
    logits = logits if change.softcap is None else change.softcap * (logits / change.softcap).tanh()
    drawn = penalised(logits, samples, penalties)
    kept = torch.ones_like(drawn, dtype=torch.bool) if truncation is None else truncation.kept(drawn)
    drawn = (drawn / 0.7).masked_fill(~kept.scatter(1, batch.targets_K.unsqueeze(1), True), -torch.inf)
    whole = torch.distributions.Categorical(logits=logits / 0.7)
    wanted = torch.stack(
        [
            drawn.log_softmax(dim=1).gather(1, batch.targets_K.unsqueeze(1)).squeeze(1),
            whole.entropy(),
            whole.log_prob(batch.targets_K),
        ]
    )
    gradients = torch.autograd.grad((wanted * pulls).sum(), [hidden, weight])

    values = logprobs_and_entropies(
        hidden, weight, None, batch.targets_K, 0.7, truncation, change, penalties.on(batch), trains_entropy=True
    )
    torch.testing.assert_close(values.T, wanted, atol=1e-4, rtol=1e-5)
    for one, other in zip(torch.autograd.grad((values.T * pulls).sum(), [hidden, weight]), gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


def test_words_of_an_episodes_context_have_come_before():
    """The engine reads them as a part of the prompt of the next turn. With episodes the other penalties are refused."""
    random, penalties = torch.Generator().manual_seed(3), Penalties(1.3, 0.0, 0.0)
    samples = [
        replace(one, completion=replace(one.completion, episode=Episode(context=context)))
        for one, context in zip(
            make_samples(random, torch.arange(20)), [((2, 4), (6, 9)), (), ((1, 5),), ((3, 4),)], strict=True
        )
    ]
    batch = micro_batch(samples)
    hidden, weight = (torch.randn(*shape, generator=random) for shape in ((len(batch.targets_K), 16), (257, 16)))
    values = logprobs_and_entropies(hidden, weight, None, batch.targets_K, 1.0, penalised=penalties.on(batch))
    wanted = penalised(hidden @ weight.T, samples, penalties).log_softmax(dim=1)
    torch.testing.assert_close(values[:, 0], wanted.gather(1, batch.targets_K.unsqueeze(1))[:, 0], atol=1e-4, rtol=1e-5)


def test_half_precision_logits_are_penalised_in_float32():
    random = torch.Generator().manual_seed(0)
    samples = list(make_samples(random, torch.arange(5)))
    batch = micro_batch(samples)
    hidden, weight = (torch.randn(*shape, generator=random).bfloat16() for shape in ((29, 64), (257, 64)))
    penalties = Penalties(1.0, 0.01, 0.0)  # far below the distance of neighbours in bfloat16
    values = logprobs_and_entropies(
        hidden, weight.requires_grad_(), None, batch.targets_K, 1.0, penalised=penalties.on(batch)
    )
    wanted = penalised((hidden @ weight.T).detach().float(), samples, penalties).log_softmax(dim=1)
    torch.testing.assert_close(values[:, 0], wanted.gather(1, batch.targets_K.unsqueeze(1))[:, 0], atol=1e-4, rtol=0)
    values[:, 0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.isfinite().all()


def test_a_model_gives_log_probabilities_under_penalties_and_of_the_whole_distribution():
    model, penalties = make_model("qwen2"), Penalties(1.3, 0.4, 0.2)
    batch = micro_batch(list(make_samples(torch.Generator().manual_seed(0), torch.arange(3, 9))))
    head = LogprobHead(model)
    without = head.per_token(model, batch, 0.7)
    values = head.per_token(model, batch, 0.7, penalties=penalties)
    assert values.whole_logprobs_BT.equal(without.logprobs_BT)
    assert values.entropy_BT.equal(without.entropy_BT)
    assert (values.logprobs_BT - without.logprobs_BT).abs().max() > 0.1


def test_without_penalties_none_of_it_runs():
    assert Penalties.of(TrainingConfig()) is None
    fields = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    assert Penalties.of(TrainingConfig(**fields)) == Penalties(1.1, 0.2, 0.3)
    for name, value in fields.items():
        assert Penalties.of(TrainingConfig(**{name: value})) is not None
