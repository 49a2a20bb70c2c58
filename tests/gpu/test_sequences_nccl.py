"""Two GPUs that share sequences take the steps of one, over NCCL and with the kernel of attention."""

import pytest
import torch

from grpo_spec.contract import Device
from support.families import make_model
from support.trainer.gpu_jobs import run_ranks
from support.trainer.tiny_model import make_tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]

MODES = ("2", "3", "2:lora", "2b", "3b")


def run(ranks, out, *plans):
    """Return what `programs/sequences.py` saves."""
    run_ranks("sequences.py", ranks, Device.CUDA, out, ranks, *plans)
    return torch.load(out)  # type: ignore[no-any-return]


def test_steps_are_those_of_one_gpu(tmp_path):
    model = make_model("qwen3", vocab_size=len(make_tiny_tokenizer()), num_attention_heads=6, num_key_value_heads=3)
    model.save_pretrained(tmp_path / "model")
    plans = [one for mode in MODES for one in (mode, tmp_path / "model")]
    whole, shared = run(1, tmp_path / "1.pt", *plans), run(2, tmp_path / "2.pt", *plans)
    for name, ours in shared.items():
        is_half = name.split()[0].endswith("b")
        for own, theirs in zip(ours["metrics"], whole[name]["metrics"], strict=True):
            for metric in ("loss", "grad_norm", "kl"):
                wanted = pytest.approx(theirs[metric], rel=0.03 if is_half else 1e-3, abs=1e-2 if is_half else 1e-5)
                assert own[metric] == wanted, (name, metric)
        if is_half:
            continue
        for own, theirs in zip(ours["weights"], whole[name]["weights"], strict=True):
            for weight, value in theirs.items():
                torch.testing.assert_close(
                    own[weight], value, atol=1e-4, rtol=1e-4, msg=lambda m, n=name, w=weight: f"{n} {w}: {m}"
                )
