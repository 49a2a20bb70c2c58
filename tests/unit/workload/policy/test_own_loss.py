"""A user's function in place of the token losses trains the same bits as an equal built-in one; what is refused."""

import re
from dataclasses import replace

import pytest
import torch

from grpo_spec.errors import ConfigError
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.policy.loss.own_loss import OwnLoss
from support.families import make_model
from support.trainer.samples import make_sample

FUNCTIONS = """
import torch

def ppo(log_probs, old_log_probs, advantages, mask, training):
    ratios = (log_probs - old_log_probs).exp()
    low, high = 1 - training.epsilon, 1 + training.epsilon
    losses = -torch.min(ratios * advantages, ratios.clamp(low, high) * advantages)
    return losses, {"far": ((ratios - 1).abs() > training.epsilon).float()}

def everything(**arguments):
    assert arguments.keys() == {"advantages", "log_probs", "mask", "old_log_probs", "training"}
    assert all(one.shape == arguments["mask"].shape for name, one in arguments.items() if name != "training")
    return -arguments["log_probs"] * arguments["advantages"]

def with_entropies(log_probs, entropies, **others):
    return -log_probs - entropies

def own_kl(log_probs, advantages, ref_log_probs=None):
    return -log_probs * advantages
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_losses", raising=False)


def own(name, **options):
    return OwnLoss(TrainingConfig(loss=f"my_losses:{name}", **options))


@pytest.mark.parametrize(("options", "correction"), [({}, "sequence_mask"), ({"loss_type": "grpo"}, "token_truncate")])
def test_a_function_equal_to_the_built_in_one_trains_the_same_bits(options, correction):
    results = []
    for loss in (None, "my_losses:ppo"):
        training = TrainingConfig(loss=loss, importance_sampling_correction=correction, **options)
        own_loss = OwnLoss(training) if loss else None
        model = make_model("llama")
        head, optimizer = LogprobHead(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [make_batch(0), make_batch(1)]
        scale, outputs = LossScale(num_sequences=8, num_tokens=sum(int(one.mask_BC.sum()) for one in batches)), []
        with torch.no_grad():
            batches = [replace(one, old_logprobs_BC=head.per_token(model, one, 1.0).logprobs_BT) for one in batches]
        for _ in range(3):
            for batch in batches:
                model_says = head.per_token(model, batch, 1.0)
                output, _ = batch_loss(model_says, batch, training, scale=scale, own_loss=own_loss)
                output.loss.backward()
                outputs.append(output)
            optimizer.step()
            optimizer.zero_grad()
        results.append((list(model.parameters()), outputs))
    (built_in, its_outputs), (mine, my_outputs) = results
    assert all(map(torch.equal, built_in, mine))
    assert [one.loss.item() for one in its_outputs] == [one.loss.item() for one in my_outputs]
    assert my_outputs[0].metrics["loss/far"] == 0
    assert my_outputs[-1].metrics["loss/far"] > 0


def test_it_gets_what_it_names():
    assert not own("ppo").has_kl
    everything = own("everything", beta=0.1)
    assert (everything.has_kl, everything.has_entropy) == (False, False)
    assert own("with_entropies").has_entropy
    assert own("own_kl", beta=0.1).has_kl
    assert not own("own_kl").has_kl, "without beta there is no reference model"


@pytest.mark.parametrize(
    ("takes", "returns", "message"),
    [
        ("ref_log_probs", "ref_log_probs", "takes ref_log_probs, but there is no reference model; set training.beta"),
        ("log_probs, rewards", "log_probs", "takes rewards; arguments are log_probs, old_log_probs, advantages"),
        ("log_probs", "log_probs.sum()", "returned losses of shape []; return a tensor [3, 3], a value a token"),
        ("log_probs", "log_probs.sum(1, keepdim=True)", "returned losses of shape [3, 1]; return"),
        ("log_probs", 'log_probs, {"entropy": 1.0}', "returned the metric entropy of a float; return"),
        ("advantages", "advantages", "losses that do not depend on log_probs"),
        ("log_probs", "log_probs / 0", "returned losses not finite"),
        ("log_probs, mask", "log_probs / mask.sum()", "with a gradient not finite for a micro-batch whose mask is 0"),
        ("log_probs", 'log_probs @ "x"', "raised TypeError: "),
    ],
)
def test_what_cannot_be_trained_on_is_refused(takes, returns, message, tmp_path):
    (tmp_path / "my_losses.py").write_text(f"def mine({takes}):\n    return {returns}\n")
    with pytest.raises(ConfigError, match=rf"^training\.loss: my_losses:mine.*{re.escape(message)}"):
        own("mine")


def test_a_function_that_is_not_there_is_named_with_those_that_are():
    said = r"^training\.loss: my_losses:nothing.*module my_losses has no nothing; it has ppo, everything"
    with pytest.raises(ConfigError, match=said):
        own("nothing")


def make_batch(seed):
    generator, samples = torch.Generator().manual_seed(seed), []
    for index, advantage in enumerate((-1.0, 1.0, 0.0, 2.0)):
        ids = torch.randint(3, 128, (3 + index,), generator=generator).tolist()
        samples.append(make_sample((5, 6), ids, logprobs=(-4.8,) * len(ids), advantage=advantage))
    return micro_batch(samples)
