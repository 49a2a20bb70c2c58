"""Origins of a job's values that its user did not write. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.site import Layers, Origin, origins
from grpo_operator.api.status import read_status
from grpo_spec.lenient import mapping, text


def queue_label(job: Mapping[str, Any]) -> str:
    """Return the queue that a job or its manifest names, or ""."""
    return text(mapping(mapping(job["metadata"]).get("labels")).get(names.LABEL_QUEUE))


def describe_site(job: Mapping[str, Any]) -> str:
    """Return as one line which fields of a job its site has set, empty if there are none."""
    found = origins(job["spec"], queue_label(job), read_status(job.get("status")).site or {})
    fields = {
        kind: dict.fromkeys(one.field.removeprefix("spec.") for one in found if one.kind == kind)
        for kind in names.DEFAULTS_KINDS
    }
    return "; ".join(f"{', '.join(some)} from {kind}" for kind, some in fields.items() if some)


def origin_lines(job: Mapping[str, Any], layers: Layers) -> list[str]:
    """Return a line for each value that a site sets for a job: the field, the value, and the object that it is from."""
    return [_line(one) for one in origins(job["spec"], queue_label(job), layers)]


def _line(one: Origin) -> str:
    value = one.value if isinstance(one.value, str) else json.dumps(one.value)
    return f"{one.field}: {value}  ({one.kind} {names.DEFAULTS_NAME}{', enforced' if one.enforced else ''})"
