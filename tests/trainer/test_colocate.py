"""After a push of weights vLLM samples from the trainer's policy, not from the one before."""

import pytest
import torch


@pytest.mark.vllm
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_vllm_samples_from_the_trained_weights(run_program, tiny_model, tmp_path, zero_stage):
    run_program("colocate_sync.py", 2, tiny_model, tmp_path / "out.pt", zero_stage)
    results = torch.load(tmp_path / "out.pt")
    assert [len(result["versions"]) for result in results] == [4, 8]
    for result in results:
        assert set(result["versions"]) == {2}
        assert max(result["logged"]) < 1e-4
        assert result["trained"] < 1e-4
        if result["initial"] is not None:
            assert result["initial"] > 100 * max(result["trained"], 1e-6)
