"""Rules of the CRD about a whole GRPOJob: how long names may be, and which fields may change when."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from grpo_operator.api import names
from grpo_operator.api.generation import ElasticSpec, GenerationSpec, ServerSpec

FROZEN = ("model", "dataset", "rewards", "training", "evaluation", "lora", "storage", "device", "rendezvous")
FREE_WHILE_SUSPENDED = (
    "trainer",
    "parallelism",
    "network",
    "image",
    "imagePullPolicy",
    "commonLabels",
    "commonAnnotations",
    "podTemplate",
    "cache",
)
FREE = (
    "failurePolicy",
    "scheduling",
    "suspend",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
"""Fields that may change at any time; FROZEN ones cannot once the job has started. managedBy never changes;
failurePolicy.onGenerationFailure, scheduling.gang and generation have rules of their own."""
_NOT_STARTED = "!has(oldSelf.status) || !has(oldSelf.status.attempt)"
_SUSPENDED = "oldSelf.status.conditions.exists(c, c.type == 'Suspended' && c.status == 'True')"


def _unchanged(*fields: str, section: str = "spec") -> str:
    return " && ".join(
        f"has(self.{section}.{field}) == has(oldSelf.{section}.{field}) && "
        f"(!has(self.{section}.{field}) || self.{section}.{field} == oldSelf.{section}.{field})"
        for field in fields
    )


def _others(model: type[BaseModel], *but: str) -> list[str]:
    return [field for name in model.model_fields if (field := to_camel(name)) not in but]


# The first alternative holds nearly always, and costs the API server little.
_GENERATION = "spec.generation"
_ELASTIC = f"{_GENERATION}.server.elastic"
_SCALED = " && ".join(
    [
        *(f"has({it}.{_GENERATION}.server) && has({it}.{_ELASTIC})" for it in ("self", "oldSelf")),
        _unchanged(*_others(GenerationSpec, "server"), section=_GENERATION),
        _unchanged(*_others(ServerSpec, "elastic"), section=f"{_GENERATION}.server"),
        _unchanged(*_others(ElasticSpec, "replicas", "minReplicas"), section=_ELASTIC),
    ]
)
_SAME_GENERATION = f"({_unchanged('generation')}) || ({_SCALED})"


_GROUPS = (
    "(self.spec.trainer.groups.map(g, g.name) + (has(self.spec.generation.server)"
    " ? self.spec.generation.server.groups.map(g, g.name) : []))"
)
_FITS = f"size(self.metadata.name) + 1 + size(n) <= {names.MAX_CHILD_NAME}"
_IS_GANG = "has({0}.spec.scheduling) && has({0}.spec.scheduling.gang)"
_RESTARTS_ENGINES = "{}.spec.failurePolicy.onGenerationFailure == 'RestartGeneration'"

NAME_RULES = (
    {
        "rule": f"self.metadata.name.matches('{names.NAME_PATTERN}')",
        "message": names.NAME_FORM,
    },
    {
        "rule": f"{_GROUPS}.all(n, {_FITS})",
        "message": names.too_long("<group>"),
        "messageExpression": f"'{names.too_long('%s')}'.format([{_GROUPS}.filter(n, !({_FITS}))[0]])",
    },
)
"""Rules about the names of a job and its groups."""

CHANGE_RULES = (
    {
        "rule": f"{_NOT_STARTED} || ({_unchanged(*FROZEN)})",
        "message": f"{', '.join(FROZEN)} cannot change once the job has started; create another job, and set its "
        "storage.resumeFrom to continue from a checkpoint",
    },
    {
        "rule": f"{_NOT_STARTED} || {_SUSPENDED} || ({_unchanged(*FREE_WHILE_SUSPENDED)})",
        "message": f"{', '.join(FREE_WHILE_SUSPENDED)} can change only while the job is suspended; set suspend to "
        "true and wait for the condition Suspended first",
    },
    {
        "rule": f"{_NOT_STARTED} || {_SUSPENDED} || "
        f"({_RESTARTS_ENGINES.format('self')}) == ({_RESTARTS_ENGINES.format('oldSelf')})",
        "message": "failurePolicy.onGenerationFailure can change to or from RestartGeneration only while the job is "
        "suspended, because ranks learn from their attempt's contract whether they wait for engines; set suspend to "
        "true and wait for the condition Suspended first",
    },
    {
        "rule": f"{_NOT_STARTED} || {_SUSPENDED} || {_SAME_GENERATION}",
        "message": "of generation, only replicas and minReplicas of server.elastic can change while the job is not "
        "suspended; set suspend to true and wait for the condition Suspended first",
    },
    {
        "rule": f"{_NOT_STARTED} || {_SUSPENDED} || ({_IS_GANG.format('self')}) == ({_IS_GANG.format('oldSelf')})",
        "message": "scheduling.gang can change only while the job is suspended, because the pods of an attempt are in "
        "one gang or in none; set suspend to true and wait for the condition Suspended first",
    },
    {
        "rule": _unchanged("managedBy"),
        "message": "managedBy cannot change; create another job",
    },
)
"""Rules about what may change, for requests that do not write the status: root_rules.py."""
