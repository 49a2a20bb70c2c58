"""A colocated vLLM samples from the policy's current weights after each push, on every rank.

With `training.maxStaleness` it samples later steps too. Pushes cut them, and they continue under the new weights.

A push changes also what vLLM keeps of the weights in other forms, and of prompts that come again (its prefix cache).

Under top-p, top-k, min-p and penalties, trainer and engine give the same log-probabilities to what was sampled; with
`training.routerReplay` also where rounding decides between experts.
"""

import json

import pytest
import torch

from support.families import LONG_ROPE, make_model, make_routed_model
from support.trainer.program_errors import assert_error
from support.trainer.tiny_model import make_tiny_tokenizer

LENGTHS, EOS = (6, 9, 12), 2


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("world_size", "zero_stage", "tensor_parallel", "trains", "family", "dtype", "staleness"),
    [
        (2, 3, 1, "all", "olmo2", "float32", 0),  # vLLM has no model for it: it builds and changes transformers' class
        (2, 2, 1, "adapters", "qwen3_moe", "float32", 2),  # adapters of stacked experts
        (2, 2, 2, "all", "gpt_oss", "float32", 0),  # vLLM writes past the loaders of its reload
        (4, 2, 2, "all", "llama", "float32", 2),  # tied
        (1, 2, 1, "4bit", "phi3", "float32", 0),  # factors of RoPE by the length that the job allows; long prompts
        (1, 2, 1, "all", "llama", "bfloat16", 0),  # logits are rounded, and so is what sampling keeps
    ],
)
def test_vllm_samples_from_the_trained_weights(
    run_program, tiny_model, tmp_path, world_size, zero_stage, tensor_parallel, trains, family, dtype, staleness
):
    """Also of families whose weights are renamed and split for checkpoints, and with `training.maxStaleness`."""
    fields = LONG_ROPE | {"max_position_embeddings": 512} if family == "phi3" else {}
    model = tiny_model if family == "llama" else save_with_tokenizer(family, tmp_path / "model", **fields)
    arguments = (model, tmp_path / "out.pt", zero_stage, tensor_parallel, trains, dtype, staleness)
    run_program("colocate_sync.py", world_size, *arguments)
    results = torch.load(tmp_path / "out.pt", weights_only=False)
    # Rank r has r + 1 prompts and gets its own completions back, also where ranks with uneven shares sample together.
    assert [len(result["versions"]) for result in results] == [4 * (rank + 1) for rank in range(world_size)]
    # A prompt's samples depend on its seed, not on the rank that asks or on its other prompts.
    assert all(result["common"] == results[0]["common"] for result in results)
    assert len(set(results[0]["common"])) == 4
    for result in results:
        assert min(result["spreads"]) > 0, "rewards of each group differ, so that there is something to learn"
        assert set(result["versions"]) == {2}
        assert result["texts"] == result["whole_texts"]
        assert result["is_stopped"] is (None if staleness else True)
        for mean, without, largest, _ in result["truncated"]:
            assert without < 0.95, "a trainer that knows of no truncation must be noticed"
            assert abs(mean - 1) < 0.01
            # One of 20 kept words more or less changes the others by 5%; in bfloat16 it may be a few words.
            assert largest < (0.1 if dtype == "float32" else 0.5)
        *_, largest, without = result["penalised"]  # no token is at a boundary
        assert without > 0.2, "a trainer that knows of no penalty must be noticed"
        assert largest < (1e-4 if dtype == "float32" else 0.1)
        assert max(result["logged"]) < (1e-4 if dtype == "float32" else 0.1)
        assert result["trained"] < (1e-4 if dtype == "float32" else 0.1)
        if dtype == "bfloat16":
            continue  # two steps move its log-probabilities less than rounding does
        if result["initial"] is not None:
            assert result["initial"] > 100 * max(result["trained"], 1e-6)
        stale, changed, missing = result["complaints"]
        assert_error(stale, "WeightsDifferError", "fixed tokens log-probabilities that differ by")
        if trains == "4bit":
            assert changed is None, "the first weights are not those that the engine has loaded"
        else:
            said = "the same weights that it had loaded, and then had others in"
            assert_error(changed, "WeightsDifferError", said)
        assert_error(missing, "WeightsDifferError", r"the push has no weights, or too few, for model\.layers\.")
        if staleness:
            check_ahead(result["ahead"])


def check_ahead(ahead):
    """Completions that two pushes cut are whole, and each token is from the weights that the engine had then."""
    completions = [[one for group in groups for one in group] for _, groups in ahead["steps"]]
    for step, (whole, before, after) in enumerate(zip(completions, ahead["before"], ahead["after"], strict=True)):
        for one, old, new in zip(whole, before, after, strict=True):
            assert len(old) == len(new) == len(one.token_ids) == len(one.logprobs) <= LENGTHS[step]
            assert one.finish_reason == ("stop" if one.token_ids[-1] == EOS else "length")
            assert one.finish_reason == "stop" or len(one.token_ids) == LENGTHS[step]
            assert 3 <= one.weight_version <= one.weight_version + one.weight_updates <= 3 + step
            num_old = next((place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a > b), len(old))
            assert max([*old[:num_old], *new[num_old:]]) < 1e-4
            assert (num_old < len(old)) == (one.weight_version + one.weight_updates == 5)
            assert (num_old == 0) == (one.weight_version == 5)
    assert any(one.weight_updates for one in completions[1]), "no push of the same weights cut a completion"
    assert any(one.weight_version < 5 <= one.weight_version + one.weight_updates for one in completions[2])


def save_with_tokenizer(family, folder, make=make_model, dtype=torch.float32, **fields):
    tokenizer = make_tiny_tokenizer()
    fields |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = make(family, **fields).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.vllm
def test_a_push_changes_the_view_of_a_packed_convolution(run_program, tmp_path):
    """On CPUs, vLLM's Mamba-2 computes with that view; else log-probabilities would differ by 0.1 nats."""
    folder = save_with_tokenizer("granitemoehybrid", tmp_path / "model", dtype=torch.bfloat16)
    model = {"path": str(folder), "modes": ["2:full"], "training": {"perDeviceTrainBatchSize": 1}}
    model |= {"engineArgs": {"enable_prefix_caching": False}}  # vLLM's CPU build cannot begin in the middle
    run_program("family_steps.py", 1, "cpu", "vLLM", json.dumps([model]))
    (found,) = tmp_path.glob("*/lines.jsonl")
    assert max(json.loads(found.read_text())["pushed"]) < 0.004


@pytest.mark.vllm
def test_replayed_routers_choose_as_vllm_did_where_experts_tie(run_program, tmp_path):
    """Without the replay single tokens differ by far more than rounding; with it none does."""
    folder = save_with_tokenizer("qwen3_moe", tmp_path / "model", make_routed_model, ties=True)
    (result,) = run_program("router_replay.py", 1, folder, "cpu", "float32")
    assert result["replayed"]["max"] < 1e-4
    assert result["own"]["max"] > 0.1
    assert result["own"]["kl"] > 100 * max(result["replayed"]["kl"], 1e-6)
