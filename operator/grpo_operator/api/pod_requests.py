"""Requests of cpu and memory by a job's pods where podTemplate does not say."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from grpo_operator.api.status_section import StatusSection

_STEPS = {"m": (1000, ""), "Ki": (1024, "Mi"), "Mi": (1024, "Gi"), "Gi": (1024, "Ti")}
"""Suffixes of quantities, with how many of one are one of the next."""

Quantity = Annotated[str, Field(max_length=16, pattern=r"^([1-9][0-9]*(m|Ki|Mi|Gi|Ti)?)?$")]
"""A quantity of Kubernetes, as 500m or 4Gi; empty: none."""


class PodRequests(StatusSection):
    """Requests of cpu and memory: without any, pods would be the first that a kubelet evicts (BestEffort).

    Small, so that they fit wherever a job's GPUs do: what a job really needs depends on its model.
    """

    cpu_per_gpu: Quantity = Field("1", description="cpu for each GPU of a pod; empty: none.")
    memory_per_gpu: Quantity = Field("4Gi", description="Memory for each GPU of a pod; empty: none.")
    cpu: Quantity = Field("100m", description="cpu of a pod without GPUs; empty: none.")
    memory: Quantity = Field("256Mi", description="Memory of a pod without GPUs; empty: none.")

    def of_pod(self, gpus: int) -> dict[str, str]:
        """Return the requests of a pod with so many GPUs, by resource."""
        amounts = (
            {"cpu": times(self.cpu_per_gpu, gpus), "memory": times(self.memory_per_gpu, gpus)}
            if gpus
            else {"cpu": self.cpu, "memory": self.memory}
        )
        return {resource: amount for resource, amount in amounts.items() if amount}


def times(quantity: str, number: int) -> str:
    """Return a quantity so many times, as the API server writes it: 8 times 500m is 4."""
    found = re.fullmatch(r"([0-9]+)(m|Ki|Mi|Gi|Ti)?", quantity)
    if found is None:
        return ""
    amount, suffix = int(found[1]) * number, found[2] or ""
    while suffix in _STEPS and amount % _STEPS[suffix][0] == 0:
        amount, suffix = amount // _STEPS[suffix][0], _STEPS[suffix][1]
    return f"{amount}{suffix}"
