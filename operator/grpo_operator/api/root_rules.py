"""Rules of wide sections as rules of the whole GRPOJob, which a write of the status skips.

At each write the API server evaluates all rules of a CRD, those about the spec also where only the status changes. And
to look up one field it copies the schemas of all fields beside it: rules of sections with many fields cost it more than
the rest of a write. A rule of a section does not see the status, so it cannot be skipped; a rule of the whole job can.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]
Entry = dict[str, Any]
"""An entry of x-kubernetes-validations."""

RULES = "x-kubernetes-validations"

WIDE = {"spec": ("training", "generation"), "spec.training": (), "spec.generation": ()}
"""Sections with many fields and many rules, and which of their own sections these rules name most. All are always
there: they are required, or have a default."""

_SUMMARY = " || ".join(
    f"has(self.status.summary.{text}) && self.status.summary.{text} != oldSelf.?status.?summary.?{text}.orValue('')"
    for text in ("message", "step")
)
_WRITES_STATUS = (
    "has(self.status) && (has(self.status.phase) && self.status.phase != oldSelf.?status.?phase.orValue('') || "
    f"has(self.status.summary) && ({_SUMMARY}))"
)
"""Whether a request changes the status, and so nothing else: the operator's writes change the phase or its message, or
the step. A write that changes none of them only costs more. `oldSelf` may be optional. An object that is
being created has no status."""

_NEEDS_SIZES = re.compile(r"\.(all|exists|exists_one|filter|map|startsWith)\(|== self\.")
"""Functions of a rule on lists, and with texts that are both fields. The API server refuses a rule that may take too
long, and does not know how long these fields may be where a variable stands for their section."""


def skipped_by_the_status(schema: Schema, about_itself: Sequence[Entry], about_changes: Sequence[Entry]) -> list[Entry]:
    """Remove the rules of wide sections from the schema of a GRPOJob, and return all rules of the whole job.

    `about_itself` and `about_changes` are rules of the whole job; only the latter compare it with the older one.
    """
    own, changes = _together(about_itself, "self"), _together(about_changes, "self")
    for one in (own, changes):
        one["rule"] = f"{_WRITES_STATUS} || {one['rule']}"
    return [
        own | {"optionalOldSelf": True},
        changes,
        *(_moved(section, often, _find(schema, section).pop(RULES)) for section, often in WIDE.items()),
    ]


def _moved(section: str, often: Sequence[str], rules: Sequence[Entry]) -> Entry:
    """Return the rule of the whole job that holds if all these rules of a section do."""
    place = f"self.{section}"
    # A section that a variable stands for is looked up once.
    long = _together([one for one in rules if _NEEDS_SIZES.search(one["rule"])], place)
    plain = _together([one for one in rules if not _NEEDS_SIZES.search(one["rule"])], "it")
    for part in ("rule", "messageExpression"):
        for name in often:
            inner = plain[part].replace(f"it.{name}.", f"{name}.")
            plain[part] = f"optional.of(it.{name}).optMap({name}, {inner}).value()"
        plain[part] = f"optional.of({place}).optMap(it, {plain[part]}).value()"
    # As the API server does for rules of a section: what a stored job breaks, because a newer release has a new rule,
    # is refused only where the section changes.
    same = f"oldSelf.hasValue() && {place} == oldSelf.value().{section}"
    return {
        "rule": f"{_WRITES_STATUS} || {plain['rule']} && {long['rule']} || {same}",
        "message": f"breaks a rule of {section}",
        "messageExpression": f"'%s%s'.format([{plain['messageExpression']}, {long['messageExpression']}])",
        "fieldPath": f".{section}",
        "optionalOldSelf": True,
    }


def _together(rules: Sequence[Entry], section: str) -> Entry:
    """Return one rule for rules about `section`; its message names all that are broken."""
    conditions = [f"({_of(section, one['rule'])})" for one in rules]
    messages = [
        f"'%s. '.format([{_of(section, one['messageExpression'])}])"
        if "messageExpression" in one
        else f"'{_escaped(one['message'])}. '"
        for one in rules
    ]
    broken = [f"{condition} ? '' : {said}" for condition, said in zip(conditions, messages, strict=True)]
    return {
        "rule": f"({' && '.join(conditions)})",
        "message": "breaks a rule",
        "messageExpression": f"'{'%s' * len(broken)}'.format([{', '.join(broken)}])",
    }


def _find(schema: Schema, section: str) -> Schema:
    for name in section.split("."):
        schema = schema["properties"][name]
    return schema


def _of(section: str, expression: str) -> str:
    return re.sub(r"\bself\b", section, expression)


def _escaped(message: str) -> str:
    return message.replace("\\", "\\\\").replace("'", "\\'")
