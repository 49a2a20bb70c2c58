"""From a spec to a consistent world of pods."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import job, spec, world

from grpo_operator import names
from grpo_operator.api import parse_spec
from grpo_operator.builders import manifests
from grpo_operator.crd import TARGETS, render
from grpo_operator.topology import make_contract, plan_topology
from grpo_workload.contract import Contract

GROUPS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=5)


def _groups(shape: list[tuple[int, int]]) -> dict:
    groups = [{"name": f"g{i}", "replicas": replicas, "gpus": gpus} for i, (replicas, gpus) in enumerate(shape)]
    return {"trainer": {"groups": groups}, "training": {"promptsPerStep": 4096}}


@given(GROUPS)
def test_ranks_are_contiguous_and_unique_whatever_the_groups(shape: list[tuple[int, int]]) -> None:
    made, topology = world(**_groups(shape))
    ranks = [member.rank_offset + local for member in topology.members for local in range(member.gpus)]
    assert ranks == list(range(sum(replicas * gpus for replicas, gpus in shape)))
    contract = make_contract(made, topology, 0)
    assert contract.world_size == len(ranks)
    assert contract.master.host == "job-g0-0.job.ns.svc"
    assert Contract.model_validate_json(contract.model_dump_json(by_alias=True)) == contract


@given(GROUPS)
def test_every_pod_of_the_contract_is_one_that_a_statefulset_makes(shape: list[tuple[int, int]]) -> None:
    made, topology = world(**_groups(shape))
    sets = [m for m in manifests(made, topology, 0) if m["kind"] == "StatefulSet"]
    pods = {
        f"{s['metadata']['name']}-{ordinal}": s["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for s in sets
        for ordinal in range(s["spec"]["replicas"])
    }
    assert pods == {member.pod: str(member.gpus) for member in topology.members}


def test_every_child_is_owned_and_labelled() -> None:
    for child in manifests(*world(), 0):
        assert child["metadata"]["ownerReferences"][0]["uid"] == "uid"
        assert child["metadata"]["labels"][names.LABEL_JOB_UID] == "uid"
        json.dumps(child)


def test_a_group_is_laid_over_the_job_as_strategic_merge_does() -> None:
    over = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}], "resources": {"limits": {"cpu": "8"}}, "tolerations": []}
    made = job(
        podTemplate={
            "nodeSelector": {"pool": "h100"},
            "tolerations": [{"key": "gpu"}],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "HF_HOME", "value": "/mine"}],
            "resources": {"limits": {"memory": "64Gi"}},
        },
        trainer={"groups": [{"name": "a", "gpus": 7, "podTemplate": over}]},
    )
    template = manifests(made, plan_topology(made), 0)[-1]["spec"]["template"]["spec"]
    container = template["containers"][0]
    assert template["nodeSelector"] == {"pool": "h100"}
    assert "tolerations" not in template
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert (env["NCCL_DEBUG"], env["HF_HOME"]) == ("INFO", "/mine")
    assert len(env) == len(container["env"])
    assert container["resources"]["limits"] == {"memory": "64Gi", "cpu": "8", "nvidia.com/gpu": "7"}


def test_a_cpu_job_asks_for_no_gpu_unless_told() -> None:
    made = job(device={"type": "cpu"})
    assert manifests(made, plan_topology(made), 0)[-1]["spec"]["template"]["spec"]["containers"][0]["resources"] == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"model": {"name": "a", "path": "b"}}, "spec.model: exactly one of name, path must be set"),
        ({"training": {"numGenerations": 1}}, "spec.training.numGenerations: Input should be greater than or equal to 2 (found 1)"),
        ({"training": {"promptsPerStep": 2}}, "spec: training.promptsPerStep must be at least the number of ranks"),
        ({"trainer": {"groups": [{"name": "A", "gpus": 1}]}}, "spec.trainer.groups[0].name: String should match pattern"),
        ({"podTemplate": {"env": [{"name": "WORLD_SIZE"}]}}, "spec.podTemplate: env must not set the operator's own variables"),
    ],
)
def test_a_fault_names_the_field(change: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_spec(spec(**change))


def test_the_crd_files_are_what_the_models_say() -> None:
    for path in TARGETS:
        assert path.read_text() == render(), f"{path} is stale; run `make crds`"
