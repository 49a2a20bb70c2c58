"""A step is that of a plain loop with torch's AdamW, and does not depend on ranks, micro-batches, the prompts that they
share, ZeRO stage or offloaded optimizer states; one that is not finite is skipped, and weights that are not finite are
not saved."""

import math

import pytest
import torch

from support.families import make_model
from support.trainer.program_errors import assert_error


@pytest.mark.parametrize(("beta", "has_experts"), [(0.0, True), (0.1, False)])
def test_uneven_ranks_and_micro_batches_equal_one_batch_on_one_rank(
    run_program, tiny_model, tmp_path, beta, has_experts
):
    # So many experts that no rank's tokens reach all.
    model = make_model("qwen3_moe", vocab_size=259, num_experts=64) if has_experts else None
    folder = tmp_path / "experts" if model else tiny_model
    if model:
        model.save_pretrained(folder)
    run_program("steps.py", 1, folder, tmp_path / "whole.pt", 15, beta, 0)
    run_program("steps.py", 3, folder, tmp_path / "cut.pt", 2, beta, "0", "1", "2", "3", "2+", "3+")
    whole = torch.load(tmp_path / "whole.pt")["0"]
    check_plain(whole)
    assert whole["shares prompts"] == [True, beta > 0, True]
    for stage, cut in torch.load(tmp_path / "cut.pt").items():
        for ours, expected in zip(cut["metrics"], whole["metrics"], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6), f"ZeRO-{stage}"
        assert cut["skipped"] == 1, f"ZeRO-{stage}"
        assert cut["shares prompts"] == [True, beta > 0, True], f"ZeRO-{stage}"
        assert cut["after"] == pytest.approx(whole["after"], rel=1e-3, abs=1e-5), f"ZeRO-{stage}"
        for number, (ours, expected) in enumerate(zip(cut["generation"], whole["generation"], strict=True)):
            # A ratio at the bound may be clipped by one and not by the other.
            assert ours == pytest.approx(expected, rel=5e-3, abs=2e-4), f"ZeRO-{stage}, step {number} of a generation"
        for ours, expected in zip(cut["kls"], whole["kls"], strict=True):
            assert ours == pytest.approx(expected, rel=1e-3, abs=1e-4), f"ZeRO-{stage}"
        assert cut["weights"].keys() == whole["weights"].keys()
        for name, weight in whole["weights"].items():
            # 3% of the 1e-3 by which AdamW moves any weight: where the gradient is nearly 0, rounding decides the move.
            torch.testing.assert_close(
                cut["weights"][name], weight, atol=3e-5, rtol=0, msg=lambda m, n=name, s=stage: f"ZeRO-{s} {n}: {m}"
            )
    assert whole["metrics"][0]["grad_norm"] > 0.5, "the gradient should have been clipped"
    clipped = [metrics["clip_ratio/region_mean"] for metrics in whole["generation"]]
    assert clipped[0] == 0 < min(clipped[2:]), "the first step trains with the weights that the ratios begin from"
    if beta:
        assert whole["metrics"][0]["kl"] == pytest.approx(0, abs=1e-6)
        assert whole["metrics"][1]["kl"] > 1e-4
        before, after = whole["kls"]
        assert before == pytest.approx([0] * len(before), abs=1e-5)
        assert min(map(abs, after)) > 1e-4, "each completion has become more or less likely"


def check_plain(whole):
    """Compare with a loop over unpacked sequences: temperature, penalties, KL, entropy, clipping, decay and AdamW's."""
    norms, (_, after) = zip(*whole["plain"], strict=True)
    assert [metrics["grad_norm"] for metrics in whole["metrics"]] == pytest.approx(norms, rel=1e-4)
    assert [metrics["learning_rate"] for metrics in whole["metrics"]] == pytest.approx([1e-3, 0.9e-3])
    shared = whole["weights"].keys() & after.keys()  # a checkpoint has stacked experts one by one
    assert len(shared) > len(after) / 2
    for name in shared:
        # 0.1% of what AdamW moves a weight by.
        torch.testing.assert_close(
            whole["weights"][name], after[name], atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_optimizers_for_half_precision_count_exactly_the_steps_taken(run_program, tiny_model, tmp_path):
    stages = ("0", "0b", "1b", "2b", "3b", "2c", "3c")
    run_program("steps.py", 1, tiny_model, tmp_path / "half.pt", 15, 0.0, *stages)
    results = torch.load(tmp_path / "half.pt")
    # With one step too many, the first update would be three quarters of its size.
    assert {stage: result["steps"] for stage, result in results.items()} == {stage: {2.0} for stage in stages}
    for stage, result in results.items():
        assert (result["skipped"], result["after"]["skipped"]) == (1, 0), stage
        assert result["after"]["loss"] == pytest.approx(results["0"]["after"]["loss"], abs=0.01), stage


# ZeRO stage, dtype of the weights, dtype of AdamW's states: each of DeepSpeed's optimizers, and none.
AWAY = (
    "0:float32:float32",
    "0:bfloat16:float32",
    "1:bfloat16:float32",
    "2:float32:float32",
    "2:bfloat16:bfloat16",
    "3:bfloat16:float32",
    "0:bfloat16:int8",
    "1:bfloat16:int8",
    "2:float32:int8",
    "3:bfloat16:int8",
)


def test_offloaded_states_a_step_that_is_not_finite_and_measuring_micro_batches_change_no_bit(
    run_program, tiny_model, tmp_path
):
    run_program("states_away.py", 2, tiny_model, tmp_path / "data", tmp_path / "away.pt", *AWAY)
    results = torch.load(tmp_path / "away.pt")
    assert tuple(results) == AWAY
    for plan, result in results.items():
        for ours, expected in zip(result["away"], result["plain"], strict=True):
            assert same(ours, expected), plan
        # Passes over 8, 32, 128 and 256 tokens; then the line through the last two, for the rank with least memory.
        fits = 128 + (2000 - 1000) * (256 - 128) // (4000 - 1000)
        for halvings, (tokens, rooms, longest, fed, *unchanged) in enumerate(result["chosen"]):
            assert (tokens, rooms, longest) == (fits >> halvings, [2000, 2001], 2050), plan
            assert fed == [(2, 1), (8, 1), (32, 1), (128, 1), (256, 1), (300, 1)], f"{plan}: the longest comes last"
            assert unchanged == [True, 0], plan
        by_line = math.ceil(1000 + (300 - 100) * (1000 - 300) / (100 - 32))
        assert result["too long"] == (2100, by_line, "tried to allocate 20 GiB"), plan
        many, one = result["too many"]
        said = r"ran out of memory on a micro-batch of \d+ tokens in 4 sequences; lower training.maxTokensPerMicroBatch"
        assert_error(many, "MicroBatchMemoryError", said)
        said = r"on a single sequence of \d+ tokens, .* lower training.maxCompletionLength"
        assert_error(one, "SequenceMemoryError", said)
        between, back, counted = result["sizes"]
        # In 8 bits, the constants of the last block and 256 values of a byte are what the plan leaves out.
        assert (between, back) == (0, pytest.approx(counted, rel=0.02) if plan.endswith("int8") else counted), plan
        assert counted > 0
        assert same(result["loaded"], result["away"][1][2]), f"{plan}: the checkpoint saved from the host differs"
        assert same(result["resumed"], result["away"][2]), f"{plan}: resuming from the checkpoint differs"
        for skipped, loss, is_unchanged in result["broken"]:
            assert (skipped, is_unchanged) == (1.0, True), plan
            assert not math.isfinite(loss), plan
        broken = "1 weight is NaN or infinite, for example model.embed_tokens.weight"
        assert_error(result["refused"], "NotFiniteError", broken)
        assert result["kept"] == ["step-3"], plan
        before, after = result["decayed"]
        for name, weight in before.items():
            factor = 1.0 if "norm" in name else 1 - 0.1 * 0.5
            assert after[name].equal((weight.float() * factor).to(weight.dtype)), f"{plan}: {name}"


def same(ours, expected):
    """Return whether both are equal, with tensors bitwise equal."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(ours, expected)
    if isinstance(expected, dict):
        return ours.keys() == expected.keys() and all(same(ours[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(ours) == len(expected) and all(same(one, other) for one, other in zip(ours, expected, strict=True))
    return ours == expected
