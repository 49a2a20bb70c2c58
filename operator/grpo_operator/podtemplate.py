"""Laying one pod template over another, as users of strategic merge patch expect: maps by key, lists by each element's key. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo_operator.api import PodTemplate

_KEYS = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name"}
"""Merge keys, from k8s.io/api/core/v1's patchMergeKey tags; lists not named here (tolerations, envFrom) are replaced, as there."""


def merge(base: PodTemplate, over: PodTemplate) -> PodTemplate:
    """`over` laid over `base`: what `over` leaves unset stays as in `base`."""
    lower = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
    upper = over.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return PodTemplate.model_validate(_merge_maps(lower, upper))


def _merge_maps(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge_maps(below, value)
        elif isinstance(value, list) and isinstance(below, list) and key in _KEYS:
            merged[key] = _merge_lists(below, value, _KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_lists(lower: Iterable[dict[str, Any]], upper: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    merged = {item[key]: item for item in lower}
    for item in upper:
        merged[item[key]] = item
    return list(merged.values())
