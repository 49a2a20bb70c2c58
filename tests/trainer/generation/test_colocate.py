"""A colocated vLLM samples from the policy's current weights after each push, on every rank."""

import pytest
import torch


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("world_size", "zero_stage", "tensor_parallel", "trains"),
    [(2, 2, 1, "all"), (2, 2, 1, "adapters"), (2, 3, 1, "all"), (4, 2, 2, "all")],
)
def test_vllm_samples_from_the_trained_weights(
    run_program, tiny_model, tmp_path, world_size, zero_stage, tensor_parallel, trains
):
    run_program("colocate_sync.py", world_size, tiny_model, tmp_path / "out.pt", zero_stage, tensor_parallel, trains)
    results = torch.load(tmp_path / "out.pt")
    # Rank r has r + 1 prompts and gets its own completions back, also where ranks with uneven shares sample together.
    assert [len(result["versions"]) for result in results] == [4 * (rank + 1) for rank in range(world_size)]
    # A prompt's samples depend on its seed, not on the rank that asks or on its other prompts.
    assert all(result["common"] == results[0]["common"] for result in results)
    assert len(set(results[0]["common"])) == 4
    for result in results:
        assert min(result["spreads"]) > 0, "rewards of each group differ, so that there is something to learn"
        assert set(result["versions"]) == {2}
        assert max(result["logged"]) < 1e-4
        assert result["trained"] < 1e-4
        if result["initial"] is not None:
            assert result["initial"] > 100 * max(result["trained"], 1e-6)
