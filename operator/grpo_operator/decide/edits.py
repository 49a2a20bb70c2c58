"""Copies of a status and of its parts with other values of some fields, whose names and types mypy checks. Pure."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

from pydantic import JsonValue

from grpo_operator.api.placement_status import Admission, AvoidedNode, FailedNode, PlacementStatus, PlacementTimeouts
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.progress_status import DownloadStatus, EvaluationStatus, ExportStatus, ProgressStatus
from grpo_operator.api.status import (
    ConditionStatus,
    Disruption,
    ElasticStatus,
    Failure,
    GroupStatus,
    GRPOJobStatus,
    MemberOutcome,
    MemberStatus,
    RecentRestarts,
    Restarts,
    Summary,
)
from grpo_operator.api.status_section import StatusSection
from grpo_operator.api.times import Time
from grpo_operator.api.usage_status import Usage


class StatusFields(TypedDict, total=False):
    """All fields of GRPOJobStatus."""

    phase: str
    observed_generation: int
    conditions: tuple[ConditionStatus, ...]
    attempt: int | None
    pods_attempt: int | None
    attempt_start_time: Time | None
    running_time: Time | None
    admission: Admission | None
    placement: PlacementStatus | None
    placement_timeouts: PlacementTimeouts | None
    restarts: Restarts
    recent_restarts: RecentRestarts | None
    defaults: dict[str, JsonValue] | None
    site: dict[str, JsonValue] | None
    pod_requests: PodRequests | None
    micro_batch_halvings: int
    next_restart_time: Time | None
    download: DownloadStatus | None
    avoid_nodes: tuple[AvoidedNode, ...]
    failed_nodes: tuple[FailedNode, ...]
    start_time: Time | None
    active_since: Time | None
    active_seconds: int
    completion_time: Time | None
    groups: tuple[GroupStatus, ...]
    members: tuple[MemberStatus, ...]
    elastic: ElasticStatus | None
    last_failure: Failure | None
    progress: ProgressStatus | None
    evaluation: EvaluationStatus | None
    checkpoint: str | None
    export: ExportStatus | None
    usage: Usage | None
    summary: Summary


class ConditionFields(TypedDict, total=False):
    """Fields of ConditionStatus that change by themselves."""

    message: str
    observed_generation: int


class MemberFields(TypedDict, total=False):
    """Fields of MemberStatus that change while it is one pod's."""

    node: str | None
    outcome: MemberOutcome | None
    disruption: Disruption | None
    replacing: bool
    replace_time: Time | None
    failures: int


class FailureFields(TypedDict, total=False):
    """Fields of Failure that follow from what the job did before, or what other pods do."""

    pod: str | None
    node: str | None
    exit_code: int | None
    reason: str
    message: str
    counted: bool
    step: int | None


class ProgressFields(TypedDict, total=False):
    """Fields of ProgressStatus that change by themselves."""

    step: int
    checkpoint_step: int | None
    advice: None
    time: Time


class GroupFields(TypedDict, total=False):
    """Fields of GroupStatus that change by themselves."""

    ready: int
    incarnation: int


@overload
def edit(section: GRPOJobStatus, **fields: Unpack[StatusFields]) -> GRPOJobStatus: ...
@overload
def edit(section: ConditionStatus, **fields: Unpack[ConditionFields]) -> ConditionStatus: ...
@overload
def edit(section: MemberStatus, **fields: Unpack[MemberFields]) -> MemberStatus: ...
@overload
def edit(section: GroupStatus, **fields: Unpack[GroupFields]) -> GroupStatus: ...
@overload
def edit(section: MemberOutcome, *, message: str = ..., finished_at: Time | None = ...) -> MemberOutcome: ...
@overload
def edit(section: Disruption, *, message: str) -> Disruption: ...
@overload
def edit(section: Failure, **fields: Unpack[FailureFields]) -> Failure: ...
@overload
def edit(section: Restarts, *, counted: int) -> Restarts: ...
@overload
def edit(section: RecentRestarts, *, step: int) -> RecentRestarts: ...
@overload
def edit(section: DownloadStatus, *, retry_time: Time | None) -> DownloadStatus: ...
@overload
def edit(section: ProgressStatus, **fields: Unpack[ProgressFields]) -> ProgressStatus: ...
def edit(section: StatusSection, **fields: Any) -> StatusSection:
    """Return a copy with these values. They are not validated, as all of them are the operator's own."""
    return section.model_copy(update=fields)
