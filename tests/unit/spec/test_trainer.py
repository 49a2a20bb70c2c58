"""Settings that follow from several sections of a job."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_spec.trainer import TrainerConfig


@pytest.mark.parametrize(
    ("training", "engine_args", "correction"),
    [
        ({}, {}, "sequence_mask"),
        ({"maxStaleness": 1}, {}, "token_truncate"),
        ({}, {"quantization": "fp8"}, "token_truncate"),
        ({"importanceSamplingCorrection": "none", "maxStaleness": 1}, {"quantization": "fp8"}, "none"),
    ],
)
def test_the_correction_is_of_tokens_where_most_of_them_differ(
    training: dict[str, Any], engine_args: dict[str, Any], correction: str
) -> None:
    job = {
        "model": {"name": "m"},
        "dataset": {"name": "d"},
        "rewards": [{"name": "r", "accuracy": {}}],
        "training": training,
        "generation": {"engineArgs": engine_args},
    }
    assert TrainerConfig.model_validate(job).correction == correction
