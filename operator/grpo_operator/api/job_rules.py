"""Rules of the CRD about a whole GRPOJob: how long names may be, and which fields may change when."""

from __future__ import annotations

from grpo_operator.api import names

FROZEN = ("model", "dataset", "rewards", "training", "lora", "storage", "device", "rendezvous")
FREE_WHILE_SUSPENDED = (
    "trainer",
    "generation",
    "parallelism",
    "network",
    "image",
    "imagePullPolicy",
    "podTemplate",
    "cache",
)
FREE = (
    "failurePolicy",
    "suspend",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
"""Fields that may change at any time; FROZEN ones cannot once the job has started. managedBy never changes, and
failurePolicy.onGenerationFailure has a rule of its own."""
_SUSPENDED = "oldSelf.status.conditions.exists(c, c.type == 'Suspended' && c.status == 'True')"


def _unchanged(*fields: str) -> str:
    return " && ".join(
        f"has(self.spec.{field}) == has(oldSelf.spec.{field}) && "
        f"(!has(self.spec.{field}) || self.spec.{field} == oldSelf.spec.{field})"
        for field in fields
    )


_GROUPS = (
    "(self.spec.trainer.groups.map(g, g.name) + (has(self.spec.generation.server)"
    " ? self.spec.generation.server.groups.map(g, g.name) : []))"
)
_FITS = f"size(self.metadata.name) + 1 + size(n) <= {names.MAX_CHILD_NAME}"
_RESTARTS_ENGINES = "{}.spec.failurePolicy.onGenerationFailure == 'RestartGeneration'"

ROOT_RULES = (
    {
        "rule": f"self.metadata.name.matches('{names.NAME_PATTERN}')",
        "message": names.NAME_FORM,
    },
    {
        "rule": f"{_GROUPS}.all(n, {_FITS})",
        "message": names.too_long("<group>"),
        "messageExpression": f"'{names.too_long('%s')}'.format([{_GROUPS}.filter(n, !({_FITS}))[0]])",
    },
    {
        "rule": f"!has(oldSelf.status) || !has(oldSelf.status.attempt) || ({_unchanged(*FROZEN)})",
        "message": f"{', '.join(FROZEN)} cannot change once the job has started; create another job, and set its "
        "storage.resumeFrom to continue from a checkpoint",
    },
    {
        "rule": f"!has(oldSelf.status) || !has(oldSelf.status.attempt) || {_SUSPENDED} || "
        f"({_unchanged(*FREE_WHILE_SUSPENDED)})",
        "message": f"{', '.join(FREE_WHILE_SUSPENDED)} can change only while the job is suspended; set suspend to "
        "true and wait for the condition Suspended first",
    },
    {
        "rule": f"!has(oldSelf.status) || !has(oldSelf.status.attempt) || {_SUSPENDED} || "
        f"({_RESTARTS_ENGINES.format('self')}) == ({_RESTARTS_ENGINES.format('oldSelf')})",
        "message": "failurePolicy.onGenerationFailure can change to or from RestartGeneration only while the job is "
        "suspended, because ranks learn from their attempt's contract whether they wait for engines; set suspend to "
        "true and wait for the condition Suspended first",
    },
    {
        "rule": _unchanged("managedBy"),
        "message": "managedBy cannot change; create another job",
    },
)
