"""Settings of programs and tests without a job: no rows are read, and no reward is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_spec.trainer import TrainerConfig


def bare_settings(model: str, dtype: str, /, **sections: Any) -> TrainerConfig:
    """Return settings of a policy in the folder `model`; rows and rewards are named, as each job must, but not used."""
    unused = {"dataset": {"path": "unused"}, "rewards": [{"name": "unused", "stopped": {}}]}
    return TrainerConfig.model_validate({"model": {"path": model, "dtype": dtype}, **unused, **sections})


def step_settings(
    model: str,
    dtype: str,
    stage: str | int,
    *,
    training: Mapping[str, Any] | None = None,
    parallelism: Mapping[str, Any] | None = None,
    **sections: Any,
) -> TrainerConfig:
    """Return settings of a few large steps under a ZeRO stage.

    `training` and `parallelism` add fields to these sections, or replace theirs; `sections` are further ones.
    """
    large = {"perDeviceTrainBatchSize": 4, "learningRate": 1e-3, "weightDecay": 0.5}
    return bare_settings(
        model,
        dtype,
        training={**large, "importanceSamplingCorrection": "none", **(training or {})},
        parallelism={"zeroStage": int(stage), **(parallelism or {})},
        **sections,
    )
