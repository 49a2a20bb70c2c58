"""The part of the status that says how long the job has held GPUs, and what for."""

from __future__ import annotations

from pydantic import Field

from grpo_operator.api.status_section import StatusSection
from grpo_operator.api.times import Time

PARTS = ("training", "sampling", "waiting", "loading", "lost", "idle")
"""Uses that add up to what was held."""


class Usage(StatusSection):
    """GPU seconds of the job's pods, each from its scheduling to its end."""

    gpu_seconds: dict[str, int] = Field(
        default_factory=dict,
        description="Numbers held, and of them training, sampling, waiting, loading, lost and idle.",
    )
    attempt: dict[str, int] = Field(
        default_factory=dict,
        exclude_if=lambda known: not known,
        description="Those that ranks of this attempt explain.",
    )
    unsaved: dict[str, int] = Field(
        default_factory=dict, exclude_if=lambda known: not known, description="Those since its last checkpoint."
    )
    time: Time = Field(description="Time until which they are counted.")
