"""Settings of the experiment trackers. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_spec.schema import Section, Text

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingConfig(Section):
    """The part of `spec.training` that is about trackers. Field names are those of transformers."""

    report_to: tuple[Tracker, ...] = Field(
        (),
        max_length=4,
        description="Experiment trackers that get each step's metrics; rank 0's pod needs their credentials. Set it "
        "to see runs beside others in a tracker.",
    )
    run_name: Text | None = Field(
        None,
        description="Name of the run in trackers; the job's name when not set. Set it where jobs are created again "
        "under the same name.",
    )
    project: Text = Field(
        "grpo",
        description="Project of wandb and trackio, experiment of mlflow; the variables WANDB_PROJECT and "
        "MLFLOW_EXPERIMENT_NAME override it. Set it to keep the runs of one subject together.",
    )
