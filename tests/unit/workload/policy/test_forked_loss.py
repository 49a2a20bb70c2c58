"""An episode of several sequences has the gradients of a plain loop over them, in which each sampled token is once."""

from dataclasses import replace

import pytest
import torch

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Episode, Fork, Prompt, Sample
from grpo_workload.algorithm.step_plan import EpisodeFact, Fact, plan
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.training.exchange import micro_batches
from support.families import make_model
from support.trainer.samples import make_completion

PROMPT = Prompt(index=0, text="", token_ids=(5, 6))
BEGUN = (11, 12, 90, 91, 13)  # two own tokens, two that are read, and one of its own


def completion_of(token_ids, **episode):
    return make_completion(
        token_ids, logprobs=(-5.5,) * len(token_ids), episode=Episode(**episode) if episode else None
    )


def fork_of(token_ids, context, prompt_ids=PROMPT.token_ids):
    return Fork(prompt_ids=prompt_ids, token_ids=token_ids, logprobs=(-5.6,) * len(token_ids), context=context)


FORKED = completion_of(
    (41, 42),
    prompt_ids=(7, 8, 9),  # it ended with another history than it began with
    num_turns=5,
    forks=(
        fork_of(BEGUN, ((2, 4),)),
        fork_of((*BEGUN[:2], 92, 14, 15, 16), ((0, 2), (2, 3))),  # its first turn is the other's
    ),
)
ALONE = completion_of((21, 22, 23, 24))
ACTED = completion_of((31, 93, 32), context=((1, 2),))
SAMPLES = [
    Sample(prompt=PROMPT, completion=one, reward=0.0, advantage=advantage)
    for one, advantage in ((FORKED, 1.5), (ALONE, -0.5), (ACTED, -1.0))
]
# Of each completion its sequences: what is read, and places of what was sampled.
ROWS = [
    [
        ((7, 8, 9, 41, 42), (3, 4), -5.5),
        ((5, 6, *BEGUN), (2, 3, 6), -5.6),
        ((5, 6, 11, 12, 92, 14, 15, 16), (5, 6, 7), -5.6),
    ],
    [((5, 6, 21, 22, 23, 24), (2, 3, 4, 5), -5.5)],
    [((5, 6, 31, 93, 32), (2, 4), -5.5)],
]
OWN = [8, 4, 2]
VARIANTS = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo", "max_completion_length": 50},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
]


def facts_of(samples):
    return [
        Fact(
            prompt_tokens=sum(one.completion.num_read(PROMPT)) - one.completion.num_own,
            tokens=one.completion.num_own,
            is_truncated=False,
            reward=0.0,
            advantage=one.advantage,
            episode=EpisodeFact.of(one.completion.episode) if one.completion.episode else None,
            sequences=one.completion.num_read(PROMPT) if one.completion.episode else (),
        )
        for one in samples
    ]


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def plain(model, training):
    """Add up the loss of each sampled token, one sequence after the other."""
    total = torch.zeros(())
    for rows, num_own, sample in zip(ROWS, OWN, SAMPLES, strict=True):
        of_completion = torch.zeros(())
        for tokens, places, sampling_logprob in rows:
            logits = model(input_ids=torch.tensor([tokens])).logits[0] / training.temperature
            logprobs = torch.stack([logits[place - 1].log_softmax(-1)[tokens[place]] for place in places])
            weights = (logprobs.detach() - sampling_logprob).exp().clamp(max=1.0)
            ratios = (logprobs - logprobs.detach()).exp()
            if training.importance_sampling_level == "sequence":
                ratios = (logprobs - logprobs.detach()).mean().exp().expand(len(places))
            of_completion = of_completion - (sample.advantage * ratios * weights).sum()
        divisor = {"dapo": sum(OWN), "bnpo": sum(OWN), "grpo": num_own * 3, "dr_grpo": 3 * 50}[training.loss_type]
        total = total + of_completion / divisor
    total.backward()
    return total.item()


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_episode_that_forked_trains_each_sampled_token_once_and_counts_once(variant, size):
    training = TrainingConfig(
        temperature=0.7,
        per_device_train_batch_size=size,
        importance_sampling_correction="token_truncate",
        importance_sampling_clip_max=1.0,
        **variant,
    )
    made = plan([facts_of(SAMPLES)], training)
    assert (made.scale.num_sequences, made.scale.num_tokens) == (3, sum(OWN))
    ours, theirs, loss, num_tokens = make_model("llama"), make_model("llama"), 0.0, 0
    head = LogprobHead(ours)
    for batch in micro_batches(made, SAMPLES, 0):
        output, _ = batch_loss(head.per_token(ours, batch, 0.7), batch, training, scale=made.scale)
        output.loss.backward()
        loss += output.loss.item()
        num_tokens += output.metrics["num_tokens"].item()
    assert num_tokens == sum(OWN)
    assert loss == pytest.approx(plain(theirs, training), abs=1e-5)
    expected = gradients(theirs)
    for name, ours_of_it in gradients(ours).items():
        assert (ours_of_it - expected[name]).abs().max() < 1e-5 * max(1, expected[name].abs().max()), name
    assert max(one.abs().max() for one in expected.values()) > 1e-2


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_where_nothing_forks_no_bit_depends_on_the_number_of_sequences(variant):
    training, alone = TrainingConfig(**variant), micro_batch(SAMPLES[1:])
    assert alone.tokens_B is None
    scale, found = plan([facts_of(SAMPLES[1:])], training).scale, []
    # A micro-batch has `tokens_B` as soon as one sequence of it is of several.
    for batch in (alone, replace(alone, tokens_B=torch.tensor([4.0, 2.0]))):
        model = make_model("llama")
        output, _ = batch_loss(LogprobHead(model).per_token(model, batch, 1.0), batch, training, scale=scale)
        output.loss.backward()
        found.append(gradients(model) | {"loss": output.loss.detach()})
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
