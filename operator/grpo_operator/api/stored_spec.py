"""Read the spec that the API server stores, which a CRD of another release may have changed since it was written. Pure.

A spec that an operator only partly understands must not leave a running attempt without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from grpo_operator.api.defaults import with_defaults
from grpo_operator.api.faults import UNKNOWN, explain, path_of
from grpo_operator.api.names import Role
from grpo_operator.api.site import REQUIRED, Layers, describe, find_refusal, merged
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.api.status import GRPOJobStatus
from grpo_spec import lenient
from grpo_spec.schema import WITHOUT_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpec:
    """A spec as far as it is understood."""

    spec: GRPOJobSpec

    fault: str | None = None
    """The fault. `spec` then says how the attempt that runs is looked after; no object may be built from it."""

    ignored: tuple[str, ...] = ()
    """Fields that this release does not have, as paths."""

    refused: str | None = None
    """The site's objection. With one, no attempt may begin."""


def read_spec(raw: Any, status: GRPOJobStatus, layers: Layers | None = None, label: str = "") -> StoredSpec:
    """Read a stored spec, with the layers of the job's site: those that it began with, unless others are given. Never
    raises. `label`: the queue that the job names.

    Unknown fields and nulls are ignored. A job that has begun may break rules, which a newer release may have: most of
    its sections cannot change any more. It keeps the defaults that it began with. If something else is wrong, the pods
    are those that the status shows, and every other section takes over what can be read.
    """
    layers = (status.site or {}) if layers is None else layers
    if not (layers and isinstance(raw, Mapping)):
        return _read(raw, status)
    refused = find_refusal(raw, label, layers)
    if (read := _read(merged(raw, layers), status)).fault is None:
        return replace(read, refused=refused)
    alone = _read(raw, status)
    return alone if alone.fault else replace(alone, refused=refused or f"with {describe(layers)}: {read.fault}")


def _read(raw: Any, status: GRPOJobStatus) -> StoredSpec:
    raw = with_defaults(GRPOJobSpec, raw, status.defaults)
    try:
        return StoredSpec(spec=GRPOJobSpec.model_validate(raw))
    except ValidationError as error:
        faults = [f for f in error.errors(include_url=False) if f["type"] == UNKNOWN or f["input"] is None]
    known = lenient.without(raw, faults) if faults else raw
    ignored = tuple(path_of(fault["loc"]) for fault in faults if fault["type"] == UNKNOWN)
    rules = None if status.attempt is None else WITHOUT_RULES
    try:
        return StoredSpec(spec=GRPOJobSpec.model_validate(known, context=rules), ignored=ignored)
    except ValidationError as error:
        wrong = explain(error, GRPOJobSpec)
    sections = {**known, **_running(status)} if isinstance(known, Mapping) else _running(status)
    return StoredSpec(spec=lenient.read(GRPOJobSpec, sections, REQUIRED), fault=wrong, ignored=ignored)


def _running(status: GRPOJobStatus) -> dict[str, Any]:
    """Return the sections that say which pods the attempt has."""
    groups = {
        role: [
            {"name": g.name, "replicas": g.desired} | ({} if role is Role.ENVIRONMENT else {"gpus": 1})
            for g in status.groups
            if g.role == role
        ]
        for role in Role
    }
    engines = {"topology": "Server", "server": {"groups": groups[Role.GENERATION]}}
    return {
        "trainer": {"groups": groups[Role.TRAINER]},
        "generation": engines if groups[Role.GENERATION] else {},
        "environmentPods": {"groups": groups[Role.ENVIRONMENT]} if groups[Role.ENVIRONMENT] else None,
    }
