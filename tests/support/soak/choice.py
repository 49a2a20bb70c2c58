"""The next act of the soak, from a seeded random number generator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from support.soak.expected import ENDED, Expected

SHAPES: Mapping[str, dict[str, Any]] = {
    "one pod": {"trainer": {"groups": [{"name": "a", "gpus": 1}]}},
    "uneven": {"trainer": {"groups": [{"name": "a", "gpus": 7}, {"name": "b", "gpus": 8}]}},
    "replicas": {"trainer": {"groups": [{"name": "a", "replicas": 3, "gpus": 1}, {"name": "b", "gpus": 2}]}},
    "engines": {
        "trainer": {"groups": [{"name": "a", "gpus": 2}]},
        "generation": {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 2, "gpus": 1}]}},
    },
}
TRAINERS = ("one pod", "uneven", "replicas")
"""Shapes that a suspended job without engines may change to."""

IMPATIENT = 0.3
"""The share of acts on a job that is not at rest."""

_ABSENT = {"create": 1}
_ALWAYS = {"annotate": 1, "delete": 1, "recreate": 1}
_RUNNING = {"finish": 2, "suspend": 3, "fail": 3, "evict": 2, "kill": 2, "allow": 1, "delete child": 3}
_RUNNING |= {"edit service": 1, "scale down": 1, "scale up": 1, "delete set": 1}
_IMPATIENT = ("suspend", "fail", "evict", "kill", "delete child", "scale down", "delete set")
_SUSPENDED = {"resume": 4, "reshape": 2, "delete child": 1}

Action = tuple[str, str]
"""An act, and the name of its job."""


def choose(random: Random, jobs: Mapping[str, Expected | None], at_rest: frozenset[str]) -> Action | None:
    """Return what is done to one of the jobs (None: it does not exist); None if that one is to be left in peace."""
    name = random.choice(sorted(jobs))
    job, patience = jobs[name], random.random()
    if job is not None and name not in at_rest and patience > IMPATIENT:
        return None
    weights = possible(job, at_rest=name in at_rest)
    return random.choices(list(weights), list(weights.values()))[0], name


def possible(job: Expected | None, *, at_rest: bool) -> dict[str, int]:
    """Return what may be done to a job, with its weight."""
    if job is None:
        return _ABSENT
    if job.closing or job.phases <= ENDED:
        return _ALWAYS | ({} if at_rest else {"resume" if job.suspended else "suspend": 1})
    if at_rest:
        return _ALWAYS | (_SUSPENDED if job.suspended else _RUNNING)
    return _ALWAYS | ({"resume": 4} if job.suspended else {kind: _RUNNING[kind] for kind in _IMPATIENT})


def new_spec(random: Random) -> dict[str, Any]:
    """Return the fields of a new job's spec."""
    shape = random.choice(list(SHAPES))
    policy: dict[str, Any] = {"maxRestarts": random.choice((0, 1, 3)), "backoffSeconds": random.choice((0, 1))}
    policy["nodeLostSeconds"] = 3600  # a fake node that is late on a busy machine is not lost
    if shape == "engines" and random.random() < 0.7:
        policy["onGenerationFailure"] = "RestartGeneration"
    spec = {**SHAPES[shape], "training": {"promptsPerStep": 120}, "failurePolicy": policy}
    if random.random() < 0.25:
        spec["ttlSecondsAfterFinished"] = random.choice((0, 3))
    if random.random() < 0.15:
        spec["activeDeadlineSeconds"] = random.choice((10, 45))
    if random.random() < 0.1:
        spec["suspend"] = True
    return spec


def other_shape(random: Random, job: Expected) -> dict[str, Any]:
    """Return the fields that change the shape of a suspended job."""
    if job.has_engines:
        groups = [{"name": "gen", "replicas": random.choice((1, 2, 3)), "gpus": 1}]
        return {"generation": {"topology": "Server", "server": {"groups": groups}}}
    return SHAPES[random.choice(TRAINERS)]
