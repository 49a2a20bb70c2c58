"""Which experiment trackers are told of a run. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_workload.section import Section, Text


class TrackingConfig(Section):
    """The part of `spec.training` that is about trackers. Names are transformers'."""

    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        (), max_length=3, description="Experiment trackers that are told each step's metrics; rank 0's pod needs their credentials."
    )
    run_name: Text | None = Field(None, description="Name of the run in trackers: the job's when not set.")
    project: Text = Field(
        "grpo", description="Project of wandb, experiment of mlflow; the variables WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME go first."
    )
