"""How a step is cut into ranks and micro-batches, and how it is partitioned, changes nothing about it."""

import pytest
import torch


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_uneven_ranks_and_micro_batches_equal_one_batch_on_one_rank(run_program, tiny_model, tmp_path, beta):
    run_program("steps.py", 1, tiny_model, tmp_path / "whole.pt", 15, beta, 0)
    run_program("steps.py", 3, tiny_model, tmp_path / "cut.pt", 2, beta, "0", "1", "2", "3", "2+", "3+")
    whole = torch.load(tmp_path / "whole.pt")["0"]
    for stage, cut in torch.load(tmp_path / "cut.pt").items():
        for ours, expected in zip(cut["metrics"], whole["metrics"], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6), f"ZeRO-{stage}"
        assert cut["weights"].keys() == whole["weights"].keys()
        for name, weight in whole["weights"].items():
            # Of the 1e-3 that AdamW moves a weight by, whatever its gradient: rounding decides where that is nearly 0.
            torch.testing.assert_close(cut["weights"][name], weight, atol=3e-5, rtol=0, msg=lambda m, n=name, s=stage: f"ZeRO-{s} {n}: {m}")
    assert whole["metrics"][0]["grad_norm"] > 0.5, "the gradient was to be clipped"
    if beta:
        assert whole["metrics"][0]["kl"] == pytest.approx(0, abs=1e-6)
        assert whole["metrics"][1]["kl"] > 1e-4


def test_optimizers_for_half_precision_count_the_steps_that_were_taken(run_program, tiny_model, tmp_path):
    run_program("steps.py", 1, tiny_model, tmp_path / "half.pt", 15, 0.0, "0", "0b", "1b", "2b", "3b")
    # A step too many would make the first update three quarters of what it is to be.
    assert {stage: result["steps"] for stage, result in torch.load(tmp_path / "half.pt").items()} == {
        stage: {2.0} for stage in ("0", "0b", "1b", "2b", "3b")
    }
