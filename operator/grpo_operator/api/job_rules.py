"""Rules of the CRD about a whole GRPOJob: how long names may be, and which fields may change when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from grpo_operator.api import names
from grpo_operator.api.generation import ElasticSpec, GenerationSpec, ServerSpec
from grpo_spec.schema import in_cel

Schema = dict[str, Any]
Entry = dict[str, str]

FROZEN = (
    "model",
    "dataset",
    "rewards",
    "tools",
    "environments",
    "training",
    "evaluation",
    "lora",
    "storage",
    "device",
    "rendezvous",
)
FREE_WHILE_SUSPENDED = (
    "trainer",
    "episodes",
    "parallelism",
    "network",
    "image",
    "imagePullPolicy",
    "commonLabels",
    "commonAnnotations",
    "podTemplate",
    "cache",
    "environmentPods",
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
_SCALED_FIELDS = ("generation.server.elastic.replicas", "generation.server.elastic.minReplicas")
_SAME_GENERATION = f"({_unchanged('generation')}) || ({_SCALED})"


_GROUPS = (
    "(self.spec.trainer.groups.map(g, g.name)"
    " + (has(self.spec.generation.server) ? self.spec.generation.server.groups.map(g, g.name) : [])"
    " + (has(self.spec.environmentPods) ? self.spec.environmentPods.groups.map(g, g.name) : []))"
)
_FITS = f"size(self.metadata.name) + 1 + size(n) <= {names.MAX_CHILD_NAME}"
_IS_GANG = "has({0}.spec.scheduling) && has({0}.spec.scheduling.gang)"
_RESTARTS_ENGINES = "{}.spec.failurePolicy.?onGenerationFailure.orValue('') == 'RestartGeneration'"  # never the default

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

_SUSPEND_FIRST = (
    "can change only while the job is suspended; set suspend to true and wait for the condition Suspended first"
)
_ONCE_STARTED = (
    "cannot change once the job has started; create another job, and set its storage.resumeFrom to continue from a "
    "checkpoint"
)
_ELASTIC_ALONE = (
    f"{_SUSPEND_FIRST}; of generation, only replicas and minReplicas of server.elastic can change while it is not"
)
_BY_SECTION = (
    (f"{_NOT_STARTED} || ({_unchanged(*FROZEN)})", FROZEN, _ONCE_STARTED),
    (
        f"{_NOT_STARTED} || {_SUSPENDED} || ({_unchanged(*FREE_WHILE_SUSPENDED)})",
        FREE_WHILE_SUSPENDED,
        _SUSPEND_FIRST,
    ),
    (f"{_NOT_STARTED} || {_SUSPENDED} || {_SAME_GENERATION}", ("generation",), _ELASTIC_ALONE),
)
"""Rules about whole sections: the rule, the sections, and what is said of a field that changes."""

_BY_FIELD = (
    {
        "rule": f"{_NOT_STARTED} || {_SUSPENDED} || "
        f"({_RESTARTS_ENGINES.format('self')}) == ({_RESTARTS_ENGINES.format('oldSelf')})",
        "message": "failurePolicy.onGenerationFailure can change to or from RestartGeneration only while the job is "
        "suspended, because ranks learn from their attempt's contract whether they wait for engines; set suspend to "
        "true and wait for the condition Suspended first",
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
"""Rules about single fields."""


def change_rules(spec: Schema) -> list[Entry]:
    """Return the rules about what may change, for requests that do not write the status: root_rules.py.

    `spec`: the schema of the spec, of whose fields a refusal names those that changed.
    """
    by_section = [
        {"rule": rule, "message": f"{', '.join(sections)} {said}", "messageExpression": _naming(spec, sections, said)}
        for rule, sections, said in _BY_SECTION
    ]
    return [*by_section, *_BY_FIELD]


def _naming(spec: Schema, sections: tuple[str, ...], said: str) -> str:
    """Return the expression for the names of the fields of these sections that changed, and what is said of them."""
    chosen = {"properties": {name: spec["properties"][name] for name in sections}, "required": spec["required"]}
    # Not a list of names that is joined: of the result the API server does not know how long it may be.
    names_changed = [f"{same} ? '' : '{path} '" for same, path in _compared(chosen)]
    return f"'{'%s' * len(names_changed)}{said}'.format([{', '.join(names_changed)}])"


def _compared(section: Schema, path: str = "", both: str = "") -> Iterator[tuple[str, str]]:
    """Yield for each field of a section whether it is the same, and its path. Lists are taken as a whole.

    `both`: whether both jobs have the section; empty if all have it.
    """
    for name, field in section["properties"].items():
        inner = f"{path}.{name}" if path else name
        if inner in _SCALED_FIELDS:
            continue
        new, old = (f"{job}.spec.{'.'.join(map(in_cel, inner.split('.')))}" for job in ("self", "oldSelf"))
        is_there = name in section["required"] if "required" in section else False
        has = f"has({new}) == has({old})"
        otherwise = f"!({both}) || " if both else ""
        if "properties" not in field:
            same = f"{new} == {old}" if is_there else f"{has} && (!has({new}) || {new} == {old})"
            yield f"{otherwise}{same}", inner
        elif is_there or "default" in field:
            yield from _compared(field, inner, both)
        else:
            yield f"{otherwise}{has}", inner
            yield from _compared(field, inner, " && ".join([*([both] if both else []), f"has({new}) && has({old})"]))
