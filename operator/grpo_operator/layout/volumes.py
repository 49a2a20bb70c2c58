"""Volumes of each role. Pure.

| | contract | state, tmp, shm | cache | data |
|---|---|---|---|---|
| trainer pods | read | write | write | write: checkpoints, journal, exports, datasets |
| engine pods | read | write | write: they download the model themselves | only if the job may name it for them |
| environment pods | one of their own | tmp | no | no |
"""

from __future__ import annotations

import json
from typing import Literal

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.api.pod_template import PodTemplate
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.metadata import Manifest
from grpo_spec import contract as c
from grpo_spec.schema import dump

_DATA = "data"
_READ = {"defaultMode": 0o444}
_CONTRACT = {"name": "contract", "mountPath": "/etc/grpo", "readOnly": True}
_TMP = {"name": "tmp", "mountPath": "/tmp"}


def volumes(job: Job, group: Group, user: PodTemplate, attempt: int) -> list[Manifest]:
    """Return the volumes of a group's pods. `user`: its pod settings."""
    if group.role is Role.ENVIRONMENT:
        return [
            {"name": "contract", "configMap": {"name": names.environment_map_name(job.name, group.name)} | _READ},
            {"name": "tmp", "emptyDir": {}},
        ]
    data = {"name": _DATA, **_storage(job.spec.storage.claim_name)}
    return [
        {"name": "contract", "configMap": {"name": names.contract_name(job.name, attempt)} | _READ},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *([data] if _use_of_data(job, group, user) else ()),
        {"name": "cache", **_storage(job.spec.cache.claim_name, read_only=job.spec.cache.read_only)},
    ]


def mounts(job: Job, group: Group, user: PodTemplate) -> list[Manifest]:
    """Return what the container of a group's pods mounts."""
    if group.role is Role.ENVIRONMENT:
        return [_CONTRACT, _TMP]
    sub_path, use = job.spec.storage.sub_path, _use_of_data(job, group, user)
    data: Manifest = {"name": _DATA, "mountPath": c.DATA_DIR} | ({"subPath": sub_path} if sub_path else {})
    return [
        _CONTRACT,
        {"name": "state", "mountPath": c.STATE_DIR},
        _TMP,
        {"name": "shm", "mountPath": "/dev/shm"},
        *([data | ({"readOnly": True} if use == "read" else {})] if use else ()),
        {"name": "cache", "mountPath": c.CACHE_DIR} | ({"readOnly": True} if job.spec.cache.read_only else {}),
    ]


def _storage(claim: str | None, *, read_only: bool = False) -> Manifest:
    if claim is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": claim} | ({"readOnly": True} if read_only else {})}


def _use_of_data(job: Job, group: Group, user: PodTemplate) -> Literal["read", "write"] | None:
    """Return what pods of a group do with the job's storage.

    Engines get their weights from the ranks. They read it only where the job says that the model or a file of vLLM is
    there, and write to it only where the user's settings of their pods name it, such as HF_HOME=/data/hub, or may:
    values of a ConfigMap are not known here.
    """
    settings = json.dumps(dump(user))
    may_name = any(said in settings for said in (c.DATA_DIR, f'"{_DATA}"', '"configMapRef"', '"configMapKeyRef"'))
    if group.role is Role.TRAINER or may_name:
        return "write"
    named = json.dumps([job.spec.model.path, job.spec.generation.engine_args])
    return "read" if c.DATA_DIR in named else None
