"""A job as decisions and manifests need it: its spec, and what its metadata, its status and its site say beside it.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.placement_status import Admission
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.site import Layers
from grpo_operator.api.spec import GRPOJobSpec
from grpo_spec.contract import JobRef


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue in which a job waits until Kueue admits it: labels of the job."""

    name: str
    priority_class: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A GRPOJob with its spec and the metadata that is needed."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: GRPOJobSpec
    fault: str | None = None  # what is wrong with the spec: nothing may be built from it
    site: Layers = field(default_factory=dict)  # what its site sets, which is in `spec`
    refused: str | None = None  # what its site has against it: no attempt may begin
    ignored: tuple[str, ...] = ()  # fields of the stored spec that this release does not have
    micro_batch_halvings: int = 0  # as in the status
    queue: Queue | None = None
    admission: Admission | None = None  # of the attempt that runs or that may begin
    requests: PodRequests | None = None  # what pods request where podTemplate does not say; None: nothing

    @property
    def ref(self) -> JobRef:
        """The job's identity in the contract."""
        return JobRef(namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def owner(self) -> dict[str, Any]:
        """The controller reference of every child; with it Kubernetes deletes them even if no operator runs."""
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def host(self, pod: str) -> str:
        """Return the address of one of the job's pods."""
        return names.pod_host(pod, self.name, self.namespace)
