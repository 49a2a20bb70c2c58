"""Every topology on real kubelets with real vLLM.

Asserted: after two optimizer steps the engines sample from the trained policy; their log-probabilities are those of
the trainer. tests/trainer/training/test_topology_parity.py and tests/trainer/generation test several copies in
slices, uneven groups and more ranks.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ENGINE = {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}}
ONE_AND_ONE = [{"name": "a", "gpus": 1}, {"name": "b", "gpus": 1}]

TOPOLOGIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    # An engine of two slices in its own pod. Two engines in one transfer group: test_losses.py.
    "Server": ({"server": {"groups": [{"name": "w", "gpus": 2, "tensorParallel": 2}]}}, ONE_AND_ONE),
    # A transfer group in each of two pods: a rank and an engine.
    "NodeLocal": ({"nodeLocal": {"gpusPerNode": 1}}, [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 2}]),
    # One copy of the model in two slices, each in the process of a rank.
    "Colocate": ({"tensorParallel": 2}, [{"name": "a", "gpus": 2}]),
}

# Random weights draw even and odd tokens, so that every step has something to learn without any language.
REWARD = """
def even_tokens(prompts, completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def _change(initial, trained):
    """Return the largest change of a log-probability over a fixed prompt."""
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits.log_softmax(-1)
            for folder in (initial, trained)
        )
    return float((before - after).abs().max())


# In Server, engines of tests/e2e/test_losses.py sample from the trained policy, too, and one with two slices gets all
# weights in tests/trainer/generation/test_server_engines.py.
@pytest.mark.parametrize("topology", [pytest.param("Server", marks=pytest.mark.long), "NodeLocal", "Colocate"])
def test_engines_sample_from_the_trained_policy(job, topology):
    settings, groups = TOPOLOGIES[topology]
    data = job.apply(
        files={"token_reward.py": REWARD},
        device={"type": "cpu"},
        rewards=[{"name": "even", "function": "token_reward:even_tokens"}],
        training={
            "promptsPerStep": 4,
            "numGenerations": 4,
            "maxSteps": 3,
            "maxCompletionLength": 8,
            "learningRate": 1e-3,
            "lrSchedulerType": "constant",
        },
        generation=ENGINE | {"topology": topology} | settings,
        trainer={"groups": groups},
        podTemplate={"env": [{"name": "PYTHONPATH", "value": "/data"}]},
    )
    status = job.wait_for("Complete", 900)
    third = job.metrics(data)[2]
    assert third["reward_std"] > 0
    change = _change(data / "model", data / status["checkpoint"] / "model")
    # Completions of the third step were sampled after two optimizer steps; the trainer computes the same tokens again.
    difference = third["trained/sampling/sampling_logp_difference/max"]
    assert difference < 1e-4
    assert difference < change / 100
    assert {m["role"] for m in status["members"]} == (
        {"trainer", "generation"} if topology == "Server" else {"trainer"}
    )
