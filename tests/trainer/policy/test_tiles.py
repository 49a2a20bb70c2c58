"""MLPs in tiles train as whole ones, under every ZeRO stage, where ranks have other numbers of tiles."""

import pytest
import torch

from support.families import make_model
from support.trainer.tiny_model import make_tiny_tokenizer


def test_a_step_is_that_of_whole_mlps_while_ranks_have_other_numbers_of_tiles(run_program, tmp_path):
    folders = {}
    for family in ("llama", "gemma3_text", "deepseek_v3"):
        folders[family] = tmp_path / family
        make_model(family, vocab_size=len(make_tiny_tokenizer())).save_pretrained(folders[family])
    dense = [(mode, "llama") for mode in ("0", "1", "2", "3", "2+", "3+", "0:4bit", "2:lora", "3:lora", "3:mlp")]
    plans = [*dense, ("3", "gemma3_text"), ("3", "deepseek_v3")]
    arguments = [one for mode, family in plans for one in (mode, folders[family])]
    counts = run_program("tiled.py", 2, tmp_path / "out.pt", *arguments)
    for name, ((plain, expected), (metrics, weights)) in torch.load(tmp_path / "out.pt").items():
        assert metrics == pytest.approx(plain, rel=1e-5, abs=1e-6), name
        assert weights.keys() == expected.keys()
        for weight, value in expected.items():
            torch.testing.assert_close(
                weights[weight], value, atol=2e-6, rtol=1e-6, msg=lambda m, n=name, w=weight: f"{n} {w}: {m}"
            )
        (few, own), (many, others) = (rank[name] for rank in counts)
        assert 1 < few < many, name
        assert 1 < min(own, others) < max(own, others), name
