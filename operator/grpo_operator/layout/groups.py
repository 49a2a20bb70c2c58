"""The pod groups of a job. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grpo_operator.api.names import Role
from grpo_operator.api.pod_template import GpuGroup, GroupSpec


@dataclass(frozen=True, kw_only=True)
class Group:
    """One StatefulSet: pods that differ only in their ordinal."""

    role: Role
    statefulset: str
    spec: GroupSpec
    max_replicas: int | None = None  # most pods that an elastic group may have while the job runs
    min_replicas: int = 1  # pods of an elastic group without which the job does not run
    in_gang: bool = False  # its pods get nodes together with those of the other groups in the gang

    @property
    def name(self) -> str:
        """Name of the group in the spec."""
        return self.spec.name

    @property
    def gpus(self) -> int:
        """Number of GPUs that the operator asks for in each pod."""
        return self.spec.gpus if isinstance(self.spec, GpuGroup) else 0

    @property
    def claim_template(self) -> str | None:
        """The ResourceClaimTemplate that asks for them, if they are not an extended resource."""
        return self.spec.resource_claim_template_name if isinstance(self.spec, GpuGroup) else None

    @cached_property
    def pods(self) -> tuple[str, ...]:
        """Names of the pods, in the order of their ordinals."""
        return self._pods(self.spec.replicas)

    @cached_property
    def possible_pods(self) -> tuple[str, ...]:
        """Names of all pods that the group may have while the job runs."""
        return self._pods(self.max_replicas or self.spec.replicas)

    @cached_property
    def needed_pods(self) -> tuple[str, ...]:
        """Names of the pods without which the job does not run. Of an elastic group, the first `min_replicas`."""
        return self.pods if self.max_replicas is None else self._pods(self.min_replicas)

    def _pods(self, number: int) -> tuple[str, ...]:
        return tuple(f"{self.statefulset}-{ordinal}" for ordinal in range(number))
