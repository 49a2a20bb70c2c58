"""The section `storage`: checkpoints, from which a job goes on, and models for others. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_spec.object_storage import BucketFolder
from grpo_spec.schema import ObjectName, Section, Text


class ExportConfig(Section):
    """Folders that transformers and the Hugging Face hub know, in the run's folder `exports`."""

    every_steps: int = Field(
        ge=1,
        le=10_000_000,
        description="Steps between exports, and one at the end. With training.stepsPerGeneration or numIterations, an "
        "export is written after the last step of its generation.",
    )
    keep: int = Field(
        1000,
        ge=1,
        le=1000,
        description="Number of exports to keep; older ones are deleted. Lower it where they fill the volume.",
    )
    lora: Literal["merged", "adapters"] = Field(
        "merged", description="With lora: whole models with the adapters merged in, or the adapters alone (peft)."
    )
    upload_to: BucketFolder | None = Field(
        None,
        description="Folder of a bucket (s3, gs, abfs), for example s3://models/math, to which each export is copied "
        "as well, below <namespace>/<name>/<uid>. Set it where others read models from a bucket. Credentials: the "
        "environment (podTemplate.envFrom a Secret).",
    )


class StorageConfig(Section):
    """The place of checkpoints, and the times at which they are written."""

    claim_name: ObjectName | None = Field(
        None, description="PersistentVolumeClaim for checkpoints; ReadWriteMany when several pods share it."
    )
    sub_path: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$")] | None = (
        Field(
            None,
            description="Folder on the volume in which runs are kept. Set it where the claim holds other data, too.",
        )
    )
    checkpoint_every_steps: int = Field(
        50,
        ge=1,
        le=1_000_000,
        description="Steps between checkpoints; the last step is always saved. Training waits for the copy to host "
        "memory, not for the storage. With training.stepsPerGeneration or numIterations, a checkpoint is written after "
        "the last step of its generation.",
    )
    keep: int = Field(
        2,
        ge=1,
        le=1000,
        description="Number of checkpoints to keep; older ones are deleted. Raise it to go back further than the last "
        "ones.",
    )
    export: ExportConfig | None = Field(None, description="Models for others, without what a restart needs.")
    resume_from: Text | None = Field(
        None,
        description="Another run to continue: <namespace>/<name>/<uid>, the beginning of that job's "
        "status.checkpoint. Set it to go on from a job that has ended, for example with another learning rate or other "
        "rows.",
    )
