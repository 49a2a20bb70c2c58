"""Ranks that share sequences train as one rank does, whatever the heads, the attention and the ZeRO stage."""

import pytest
import torch

from support.families import make_model
from support.trainer.tiny_model import make_tiny_tokenizer

MODELS = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "gemma2": {},  # windows, and scores that are capped
    "qwen3_moe": {},
    "gpt_oss": {},  # windows, sinks, experts
    "deepseek_v3": {},  # latent attention, whose values are smaller than its keys
}


# By number of ranks: the size of a sequence group, and the plans. With two groups, one has more to train on.
PLANS = {
    2: (2, [("2", "llama"), ("3:lora", "llama"), ("2:replay", "qwen3_moe"), ("2", "gpt_oss")]),
    3: (3, [("3", "qwen3"), ("2", "deepseek_v3"), ("0:lora", "gemma2")]),
    4: (2, [("3", "llama")]),
}


@pytest.mark.parametrize("ranks", PLANS)
def test_steps_are_those_of_one_rank(run_program, tmp_path, ranks):
    sequence, plans = PLANS[ranks]
    for family in {family for _, family in plans}:
        fields = {"vocab_size": len(make_tiny_tokenizer()), **MODELS[family]}
        make_model(family, **fields).save_pretrained(tmp_path / family)
    arguments = [one for mode, family in plans for one in (mode, tmp_path / family)]
    run_program("sequences.py", 1, "cpu", tmp_path / "whole.pt", 1, *arguments)
    run_program("sequences.py", ranks, "cpu", tmp_path / "shared.pt", sequence, *arguments)
    whole = torch.load(tmp_path / "whole.pt")
    for name, ours in torch.load(tmp_path / "shared.pt").items():
        expected = whole[name]
        assert ours["skipped"] == expected["skipped"] == 1, name
        assert ours["weights"][0].keys() == expected["weights"][0].keys()
        for step, (own, theirs) in enumerate(zip(ours["weights"], expected["weights"], strict=True)):
            for weight, value in theirs.items():
                torch.testing.assert_close(
                    own[weight],
                    value,
                    atol=1e-5,
                    rtol=1e-6,
                    msg=lambda m, n=name, s=step, w=weight: f"{n} {s} {w}: {m}",
                )
        for what in ("metrics", "generation"):
            for own, theirs in zip(ours[what], expected[what], strict=True):
                assert own == pytest.approx(theirs, rel=1e-3, abs=1e-5), (name, what)
        for own, theirs in zip(ours["kls"], expected["kls"], strict=True):
            assert own == pytest.approx(theirs, rel=1e-3, abs=1e-5), name
