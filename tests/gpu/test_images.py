"""Vision-language models learn from images on a GPU, in bfloat16, colocated; prints the differences to the engine."""

import pytest

from support.trainer.colours import LEARNT, make_job, make_rows
from support.trainer.gpu_jobs import run_on_gpu
from support.trainer.tiny_vision import make_tiny_vision

pytestmark = pytest.mark.vllm

STEPS = 30


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_model_learns_to_tell_colours(family, tmp_path):
    model, rows = make_tiny_vision(tmp_path / "model", family), make_rows(tmp_path / "rows")
    spec = make_job(model, "bfloat16", rows, maxSteps=STEPS)
    spec["generation"]["kvCacheMemory"] = "1Gi"
    rows = run_on_gpu(tmp_path, spec)
    kl = [row["trained/sampling/kl"] for row in rows if "trained/sampling/kl" in row]
    rewards = [row["reward"] for row in rows]
    print(f"{family}: KL to the engine at most {max(kl):.5f}, rewards {rewards[0]:.2f} to {rewards[-1]:.2f}")
    assert sum(rewards[-4:]) / 4 > LEARNT
    assert max(kl) < 0.01
