"""What is refused before anything is loaded, and float16 under DeepSpeed's loss scaling."""

import json
import math

import pytest
from test_train import make_config

from grpo_workload.contract import ExitCode


def test_a_type_that_devices_lack_is_refused_by_all_ranks_before_anything_loads(start_training, tmp_path):
    config = make_config(tmp_path / "nowhere", max_steps=1)
    ranks = start_training(config | {"model": {"path": str(tmp_path / "nowhere"), "dtype": "float16"}}, 2)
    assert ranks.exit_codes() == [ExitCode.CONFIG_ERROR] * 2, ranks.logs()
    for rank in range(2):
        message = json.loads((tmp_path / "train-uid" / f"state-{rank}" / "error.json").read_text())["message"]["message"]
        assert "model.dtype: float16 is not what every rank's device computes in: ranks 0-1 (CPU); bfloat16 would work" in message


def test_steps_that_overflow_in_float16_are_skipped_and_say_so(run_program, tiny_model, tmp_path):
    run_program("half.py", 2, tiny_model, tmp_path, tmp_path / "out.json", 1, 2, "3+")
    for stage, result in json.loads((tmp_path / "out.json").read_text()).items():
        steps = result["steps"]
        skipped = [step["skipped"] for step in steps]
        assert (skipped[0], skipped[-1]) == (1.0, 0.0), f"ZeRO-{stage}: {skipped}"
        assert [step["moved"] for step in steps] == [not one for one in skipped]
        # Halved at once by each skipped step, and the metric is of the step that it was applied in.
        assert [step["loss_scale"] for step in steps] == [65536.0 / 2 ** sum(skipped[:index]) for index in range(len(steps))]
        assert [math.isfinite(step["grad_norm"]) for step in steps] == [not one for one in skipped]
        # The schedule goes by the number of the step, whatever was skipped.
        assert [step["learning_rate"] for step in steps] == pytest.approx([1e-3 * (1 - index / 20) for index in range(len(steps))])
        assert result["resumed"] == [pytest.approx(step, rel=1e-2) for step in result["straight"]], f"ZeRO-{stage}"
        assert result["resumed"][0]["loss_scale"] == steps[-1]["loss_scale"] < 65536.0
