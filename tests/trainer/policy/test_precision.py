"""A dtype that devices lack is refused before anything loads; float16 trains under DeepSpeed's loss scaling."""

import math

import pytest

from grpo_spec.reports import ExitCode
from support.trainer.trainings import make_config


def test_a_dtype_that_devices_lack_is_refused_by_all_ranks_before_anything_loads(start_training, tmp_path):
    config = make_config(tmp_path / "nowhere", max_steps=1)
    ranks = start_training(config | {"model": {"path": str(tmp_path / "nowhere"), "dtype": "float16"}}, 2)
    assert ranks.exit_codes() == [ExitCode.CONFIG_ERROR] * 2, ranks.logs()
    for rank in range(2):
        said = "model.dtype: the devices of some ranks do not support float16: ranks 0-1 (CPU); bfloat16 would work"
        assert said in ranks.error(rank)


def test_steps_that_overflow_in_float16_are_skipped_and_reported_as_skipped(run_program, tiny_model, tmp_path):
    first, _ = run_program("half.py", 2, tiny_model, tmp_path, 1, 2, "3+")
    for stage, result in first.items():
        steps = result["steps"]
        skipped = [step["skipped"] for step in steps]
        assert (skipped[0], skipped[-1]) == (1.0, 0.0), f"ZeRO-{stage}: {skipped}"
        assert [step["moved"] for step in steps] == [not one for one in skipped]
        # Each skipped step halves the scale for the next one; the metric is the scale that the step itself used.
        assert [step["loss_scale"] for step in steps] == [
            65536.0 / 2 ** sum(skipped[:index]) for index in range(len(steps))
        ]
        assert [math.isfinite(step["grad_norm"]) for step in steps] == [not one for one in skipped]
        # The learning rate depends on the number of the step, including skipped ones.
        assert [step["learning_rate"] for step in steps] == pytest.approx(
            [1e-3 * (1 - index / 20) for index in range(len(steps))]
        )
        assert result["resumed"] == [pytest.approx(step, rel=1e-2) for step in result["straight"]], f"ZeRO-{stage}"
        assert [(step["skipped"], step["moved"], step["loss_scale"]) for step in result["broken"]] == [
            (1, False, 1)
        ] * 2
        assert result["resumed"][0]["loss_scale"] == steps[-1]["loss_scale"] < 65536.0
