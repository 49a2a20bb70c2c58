"""A whole job in float16 on a GPU: the loss scale settles, and the engine samples from the trained weights."""

import math

import pytest

from support.trainer.gpu_jobs import EVEN, SMALL_ENGINE, run_on_gpu
from support.trainer.tiny_model import make_tiny_model

pytestmark = pytest.mark.vllm

STEPS = 8


@pytest.mark.parametrize("stage", [2, 3])
def test_a_job_in_float16_trains(stage, tmp_path):
    spec = {
        "model": {"path": str(make_tiny_model(tmp_path / "model")), "dtype": "float16"},
        "training": {
            "promptsPerStep": 4,
            "numGenerations": 8,
            "maxSteps": STEPS,
            "maxCompletionLength": 32,
            "learningRate": 1e-4,
        },
        "parallelism": {"zeroStage": stage},
        "generation": SMALL_ENGINE,
    }
    rows = run_on_gpu(tmp_path, EVEN | spec)
    scales, skipped = [row["loss_scale"] for row in rows], [row["skipped"] for row in rows]
    kl = [row["trained/sampling/kl"] for row in rows]
    print(f"ZeRO-{stage}: loss scales {scales}, skipped {skipped}, KL to the engine {kl}")
    assert len(rows) == STEPS
    assert skipped[-1] == 0.0
    assert all(1.0 <= scale <= 65536.0 for scale in scales)
    assert all(math.isfinite(row["grad_norm"]) == (not row["skipped"]) for row in rows)
    assert max(kl) < 1e-3, "the engine does not sample from the trained weights"
