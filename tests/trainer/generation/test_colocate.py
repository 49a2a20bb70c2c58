"""A colocated vLLM samples from the policy's current weights after each push, on every rank.

Under top-p, top-k and min-p, trainer and engine give the same log-probabilities to what was sampled.
"""

import pytest
import torch

from support.families import make_model
from support.trainer.tiny_model import make_tiny_tokenizer


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("world_size", "zero_stage", "tensor_parallel", "trains", "family", "dtype"),
    [
        (2, 2, 1, "all", "olmo2", "float32"),  # vLLM has no model for it: it changes transformers' class
        (2, 2, 1, "adapters", "qwen3_moe", "float32"),  # adapters of stacked experts
        (2, 3, 1, "all", "mixtral", "float32"),  # other names in checkpoints
        (4, 2, 2, "all", "llama", "float32"),  # tied
        (1, 2, 1, "all", "llama", "bfloat16"),  # logits are rounded, and so is what sampling keeps
    ],
)
def test_vllm_samples_from_the_trained_weights(
    run_program, tiny_model, tmp_path, world_size, zero_stage, tensor_parallel, trains, family, dtype
):
    """Also of families whose weights are renamed and split for checkpoints."""
    model = tiny_model if family == "llama" else save_with_tokenizer(family, tmp_path / "model")
    arguments = (model, tmp_path / "out.pt", zero_stage, tensor_parallel, trains, dtype)
    run_program("colocate_sync.py", world_size, *arguments)
    results = torch.load(tmp_path / "out.pt")
    # Rank r has r + 1 prompts and gets its own completions back, also where ranks with uneven shares sample together.
    assert [len(result["versions"]) for result in results] == [4 * (rank + 1) for rank in range(world_size)]
    # A prompt's samples depend on its seed, not on the rank that asks or on its other prompts.
    assert all(result["common"] == results[0]["common"] for result in results)
    assert len(set(results[0]["common"])) == 4
    for result in results:
        assert min(result["spreads"]) > 0, "rewards of each group differ, so that there is something to learn"
        assert set(result["versions"]) == {2}
        for mean, without, largest in result["truncated"]:
            assert without < 0.95, "a trainer that knows of no truncation must be noticed"
            assert abs(mean - 1) < 0.01
            # One of 20 kept words more or less changes the others by 5%; in bfloat16 it may be a few words.
            assert largest < (0.1 if dtype == "float32" else 0.5)
        assert max(result["logged"]) < (1e-4 if dtype == "float32" else 0.1)
        assert result["trained"] < (1e-4 if dtype == "float32" else 0.1)
        if dtype == "bfloat16":
            continue  # two steps move its log-probabilities less than rounding does
        if result["initial"] is not None:
            assert result["initial"] > 100 * max(result["trained"], 1e-6)
        stale, changed, missing = result["complaints"]
        assert "fixed tokens log-probabilities that differ by" in stale
        assert "the same weights that it had loaded, and then had others in" in changed
        assert "the push has no weights, or too few, for model.layers." in missing


def save_with_tokenizer(family, folder):
    tokenizer = make_tiny_tokenizer()
    model = make_model(family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
