"""Ranks, engines and GPUs of every topology: an accepted spec gives consistent pods, a refused one names its field."""

import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.manifests import statefulset
from grpo_spec.contract import Contract
from support.control_plane.jobs import job, refusals, spec, world

GROUPS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=4)


def _trainer(shape: list[tuple[int, int]]) -> dict[str, Any]:
    groups = [{"name": f"t{i}", "replicas": replicas, "gpus": gpus} for i, (replicas, gpus) in enumerate(shape)]
    return {"trainer": {"groups": groups}, "training": {"promptsPerStep": 4096}}


def _server(*groups: tuple[int, int, int | None]) -> dict[str, Any]:
    rendered = [
        {"name": f"g{i}", "replicas": replicas, "gpus": gpus} | ({"tensorParallel": tp} if tp else {})
        for i, (replicas, gpus, tp) in enumerate(groups)
    ]
    return {"generation": {"topology": "Server", "server": {"groups": rendered}}}


def _node_local(**settings: Any) -> dict[str, Any]:
    tensor_parallel = settings.pop("tensorParallel", 1)
    return {"generation": {"topology": "NodeLocal", "tensorParallel": tensor_parallel, "nodeLocal": settings}}


def _check_transfers(contract: Contract) -> None:
    """Assert that each transfer group has engines, and listens on the pod of its sender."""
    for index, group in enumerate(contract.transfers):
        assert any(e.transfer == index for e in contract.engines)
        member = next(m for m in contract.members if m.rank_offset <= group.sender < m.rank_offset + m.gpus)
        assert group.host == member.host


@given(
    GROUPS,
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8), st.none() | st.integers(1, 8)), min_size=1, max_size=3),
)
def test_server_has_one_transfer_group_for_all_engines(
    shape: list[tuple[int, int]], engines: list[tuple[int, int, int | None]]
) -> None:
    assume(all(tp is None or gpus % tp == 0 for _, gpus, tp in engines))
    made, topology = world(**_trainer(shape), **_server(*engines))
    contract = make_contract(made, topology, 0)
    assert len(contract.engines) == sum(replicas for replicas, _, _ in engines)
    assert len(contract.transfers) == 1
    assert all(e.tensor_parallel * e.data_parallel == len(e.devices) for e in contract.engines)
    _check_transfers(contract)


@given(GROUPS, st.integers(1, 3), st.integers(1, 3))
def test_node_local_uses_every_gpu_of_a_pod_to_train_or_to_generate(
    shape: list[tuple[int, int]], engines: int, tensor_parallel: int
) -> None:
    kept = engines * tensor_parallel
    assume(all(gpus > kept for _, gpus in shape))
    made, topology = world(
        **_trainer(shape), **_node_local(gpusPerNode=kept, enginesPerNode=engines, tensorParallel=tensor_parallel)
    )
    contract = make_contract(made, topology, 0)
    gpus = {pod: group.spec.gpus for group in topology.groups for pod in group.pods}
    for member in contract.members:
        local = [e for e in contract.engines if e.pod == member.pod]
        taken = [device for e in local for device in e.devices]
        assert sorted([*member.devices, *taken]) == list(range(gpus[member.pod]))
        assert len({e.port for e in local}) == engines
        assert {contract.transfers[e.transfer].sender for e in local} == {member.rank_offset}
    assert [m.rank_offset + i for m in contract.members for i in range(m.gpus)] == list(range(contract.world_size))
    _check_transfers(contract)


def test_node_local_on_four_nodes_with_seven_ranks_and_one_engine_each() -> None:
    made, topology = world(**_trainer([(4, 8)]), **_node_local(gpusPerNode=1))
    contract = make_contract(made, topology, 0)
    assert contract.world_size == 28
    assert [e.devices for e in contract.engines] == [(7,)] * 4
    assert [t.sender for t in contract.transfers] == [0, 7, 14, 21]


def test_a_device_named_in_the_spec_is_used_by_vllm() -> None:
    _, topology = world(**_trainer([(1, 5)]), **_node_local(gpusPerNode=1, devices=[1]))
    assert topology.members[0].devices == (0, 2, 3, 4)
    assert topology.engines[0].devices == (1,)


REFUSED = refusals(
    """\
{generation: {topology: Server, server: {groups: [{name: g, gpus: 8, tensorParallel: 3}]}}}
    spec.generation.server.groups[0]: tensorParallel must divide gpus
{generation: {topology: Server, tensorParallel: 2, server: {groups: [{name: g, gpus: 3}]}}}
    spec.generation: tensorParallel must divide gpus x podsPerEngine of every group of server.groups
{generation: {topology: Server}}
    spec.generation: server must be set if topology is Server, and only then
{generation: {nodeLocal: {}}}
    spec.generation: nodeLocal must be set if topology is NodeLocal, and only then
{generation: {topology: Server, server: {groups: [{name: g, gpus: 1}]}}, x: 1}
    spec.x: unknown field
{generation: {tensorParallel: 2}}
    spec: generation.tensorParallel must divide gpus of every trainer group
{generation: {topology: NodeLocal, nodeLocal: {gpusPerNode: 2, enginesPerNode: 1}}}
    nodeLocal.gpusPerNode must be nodeLocal.enginesPerNode x tensorParallel
{trainer: {groups: [{name: a, gpus: 5}, {name: b, replicas: 2, gpus: 8}]}, parallelism: {sequence: 4},
generation: {topology: NodeLocal, nodeLocal: {gpusPerNode: 1}}}  # 4 + 2 x 7 ranks
    parallelism.sequence must divide the number of GPUs that train
{generation: {topology: NodeLocal, nodeLocal: {gpusPerNode: 1}}}
    generation.nodeLocal.gpusPerNode must leave every trainer pod at least one GPU to train on; 1 would work
{trainer: {groups: [{name: a, gpus: 4}]}, generation: {topology: NodeLocal, nodeLocal: {gpusPerNode: 1, devices: [4]}}}
    devices must exist in every trainer pod (0 to gpus - 1 of the smallest pod); 3
{trainer: {groups: [{name: a, gpus: 4}]},
generation: {topology: NodeLocal, nodeLocal: {gpusPerNode: 2, enginesPerNode: 2, devices: [1, 1]}}}
    devices must name gpusPerNode different devices
{model: {name: m, dtype: float16}, parallelism: {zeroStage: 0}}
    float16 needs parallelism.zeroStage 1, 2 or 3
{training: {stop: [</answer>], maxStaleness: 1}}
    training.stop needs generation.engine vLLM, and maxStaleness 0 where topology is Colocate
{training: {stop: [</answer>]}, generation: {engine: Transformers}}
    training.stop needs generation.engine vLLM, and maxStaleness 0 where topology is Colocate
{training: {routerReplay: true, maxStaleness: 1}}
    training.routerReplay needs generation.engine vLLM, and maxStaleness 0 where topology is Colocate
{training: {routerReplay: true}, generation: {engine: Transformers}}
    training.routerReplay needs generation.engine vLLM, and maxStaleness 0 where topology is Colocate
{training: {repetitionPenalty: 1.1}, generation: {engine: Transformers}}
    training.repetitionPenalty, presencePenalty and frequencyPenalty need generation.engine vLLM
{training: {frequencyPenalty: 0.1, maxStaleness: 1}}
    training.presencePenalty and frequencyPenalty need maxStaleness 0 where topology is Colocate: there a
    completion may be cut, and vLLM counts tokens only from the cut on; repetitionPenalty would work
{parallelism: {offloadOptimizer: cpu, zeroStage: 0}}
    offloadOptimizer cpu and coalesceGradReduction need zeroStage
{parallelism: {offloadOptimizer: cpu, optimizerDtype: bfloat16}}
    optimizerDtype bfloat16 and int8 need offloadOptimizer none or generating: AdamW on CPUs keeps float32
{parallelism: {offloadOptimizer: cpu, optimizerDtype: int8}}
    optimizerDtype bfloat16 and int8 need offloadOptimizer none or generating: AdamW on CPUs keeps float32
{parallelism: {optimizerDtype: bfloat16}, model: {name: m, dtype: float32}}
    parallelism.optimizerDtype bfloat16 needs model.dtype bfloat16
{generation: {topology: Server, server: {groups: [{name: g, gpus: 1}]}}, rendezvous: {port: 8000}}
    rendezvous.port, rendezvous.statusPort and the ports of generation must all differ
{generation: {topology: Server, server: {groups: [{name: g, gpus: 1}]}, engine: Transformers}}
    engine Transformers works only with topology Colocate
{generation: {topology: Server, server: {groups: [{name: a, gpus: 1}]}}}
    groups of trainer.groups and generation.server.groups must have different names
"""
)


@pytest.mark.parametrize(("change", "fault"), REFUSED)
def test_an_impossible_spec_is_refused_and_names_its_field(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_spec(spec(**change))


def _refusal(changes: dict[str, Any]) -> str | None:
    try:
        job(**changes)
    except ValueError as error:
        return str(error)
    return None


NUMBERS = st.integers(0, 9)


@given(GROUPS, st.sampled_from(["Colocate", "Server", "NodeLocal"]), NUMBERS, NUMBERS, NUMBERS)
def test_an_accepted_spec_is_consistent_and_a_refused_one_names_a_field(
    shape: list[tuple[int, int]], topology: str, tensor_parallel: int, kept: int, engines: int
) -> None:
    generation: dict[str, Any] = {"topology": topology, "tensorParallel": tensor_parallel}
    if topology == "Server":
        generation["server"] = {"groups": [{"name": "g", "replicas": engines, "gpus": kept}]}
    if topology == "NodeLocal":
        generation["nodeLocal"] = {"gpusPerNode": kept, "enginesPerNode": engines}
    changes = _trainer(shape) | {"generation": generation, "training": {"promptsPerStep": 1}}
    refusal = _refusal(changes)
    if refusal:
        assert all(fault.startswith("spec") for fault in re.split(r"; (?=spec)", refusal))
        return
    contract = make_contract(*world(**changes), 0)
    _check_transfers(contract)
    if topology == "Colocate":
        assert all(m.gpus % tensor_parallel == 0 and m.rank_offset % tensor_parallel == 0 for m in contract.members)


def test_an_engine_over_pods_has_the_pods_of_neighbouring_ordinals() -> None:
    group = {"name": "gen", "replicas": 4, "gpus": 4, "podsPerEngine": 2, "tensorParallel": 2}
    job, topology = world(generation={"topology": "Server", "server": {"groups": [group], "port": 8001}})
    first, second = topology.engines
    assert (first.pods, second.pods) == (("job-gen-0", "job-gen-1"), ("job-gen-2", "job-gen-3"))
    assert (first.host, first.meeting_port) == (job.host("job-gen-0"), job.spec.rendezvous.port)
    assert [one.port for one in first.followers] == [8001]
    assert (first.tensor_parallel, first.pipeline_parallel, first.data_parallel, first.world_size) == (2, 4, 1, 8)
    assert first.devices == (0, 1, 2, 3)
    assert topology.partners("job-gen-3") == ("job-gen-2",)
    assert topology.partners("job-gen-0") == ("job-gen-1",)
    assert topology.partners(topology.members[0].pod) == ()
    assert len(topology.needed_pods) == len(topology.members) + 4
    built = statefulset(job, topology.groups[-1], 0)
    assert built["spec"]["replicas"] == 4
