"""The base of all parts of the status."""

from __future__ import annotations

from grpo_spec.schema import Section


class StatusSection(Section):
    """A part of the status. Only the operator writes it: the spec bounds the length of lists without a limit."""
