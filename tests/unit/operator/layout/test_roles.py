"""Pods of each role: the volumes that they mount, and the variables that nobody can take from them."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from support.control_plane.jobs import job, pod_specs, spec

CLAIM = {"storage": {"claimName": "runs", "subPath": "team"}}
EVERYWHERE = {"contract", "state", "tmp", "shm", "cache"}


def _server(**group: Any) -> dict[str, Any]:
    return {"topology": "Server", "server": {"groups": [{"name": "e", "gpus": 1} | group]}}


def _data(pod: dict[str, Any]) -> dict[str, Any] | None:
    (container,) = pod["containers"]
    return next((one for one in container["volumeMounts"] if one["mountPath"] == "/data"), None)


def test_trainers_have_the_storage_and_engines_do_not() -> None:
    pods = pod_specs(job(generation=_server(), **CLAIM))
    for name in ("a", "b"):
        assert {one["name"] for one in pods[name]["volumes"]} == EVERYWHERE | {"data"}
        assert _data(pods[name]) == {"name": "data", "mountPath": "/data", "subPath": "team"}
    assert {one["name"] for one in pods["e"]["volumes"]} == EVERYWHERE
    assert {one["name"] for one in pods["e"]["containers"][0]["volumeMounts"]} == EVERYWHERE
    for pod in pods.values():
        assert pod["automountServiceAccountToken"] is False
        contract = {"name": "contract", "mountPath": "/etc/grpo", "readOnly": True}
        assert pod["containers"][0]["volumeMounts"][0] == contract


@pytest.mark.parametrize(
    ("changes", "access"),
    [
        ({"model": {"path": "/data/sft"}}, "read"),
        ({"generation": _server() | {"engineArgs": {"chat-template": "/data/chat.jinja"}}}, "read"),
        ({"podTemplate": {"env": [{"name": "HF_HOME", "value": "/data/hub"}]}}, "write"),
        ({"generation": _server(podTemplate={"volumeMounts": [{"name": "data", "mountPath": "/mine"}]})}, "write"),
        ({"podTemplate": {"envFrom": [{"configMapRef": {"name": "paths"}}]}}, "write"),
        ({"podTemplate": {"envFrom": [{"secretRef": {"name": "tokens"}}]}}, None),
        ({"model": {"path": "/models/sft"}}, None),
    ],
)
def test_engines_have_the_storage_where_the_job_names_it_for_them(changes: dict[str, Any], access: str | None) -> None:
    pod = pod_specs(job(**{"generation": _server()} | CLAIM | changes))["e"]
    mount = _data(pod)
    assert (mount is not None) == (access is not None) == ("data" in {one["name"] for one in pod["volumes"]})
    assert access is None or (mount or {}).get("readOnly", False) == (access == "read")


def test_what_a_pod_knows_itself_by_is_the_operators_whatever_a_stored_spec_says() -> None:
    """A job that has begun may break a rule that is newer than it; `envFrom` cannot be checked at all."""
    env = [
        {"name": "POD_NAME", "value": "mine"},
        {"name": "GRPO_CONTRACT", "value": "/mine"},
        {"name": "A", "value": "b"},
        {"name": "GRPO_JUDGE_URL", "value": "c"},
    ]
    template = {"env": env, "envFrom": [{"configMapRef": {"name": "any"}}]}
    stored = read_spec(spec(podTemplate=template), GRPOJobStatus(attempt=0))
    assert stored.fault is None
    made = replace(job(), spec=stored.spec)
    for pod in pod_specs(made).values():
        (container,) = pod["containers"]
        variables = {one["name"]: one for one in container["env"]}
        assert len(variables) == len(container["env"])
        assert variables["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
        assert variables["GRPO_CONTRACT"]["value"] == "/etc/grpo/contract.json"
        assert (variables["A"]["value"], variables["GRPO_JUDGE_URL"]["value"]) == ("b", "c"), "they do no harm"
        assert container["envFrom"] == [{"configMapRef": {"name": "any"}}]
