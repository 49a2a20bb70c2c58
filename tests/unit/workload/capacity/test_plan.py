"""Plans: their parts add up, less room never fits more, and every proposal fits and is one edit."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.local.edited import contract_of, edits, pod_sizes
from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.job import Job
from grpo_spec.errors import ConfigError
from grpo_spec.gpus import MEMORY, bytes_of_node, gpu_bytes
from grpo_workload.capacity import meta_pass, shapes
from grpo_workload.capacity.edits import edited
from grpo_workload.capacity.order import step_seconds
from grpo_workload.capacity.parts import PHASES
from grpo_workload.capacity.plan import Plan, plan
from grpo_workload.capacity.proposals import CannotFitError, check_fit, own_edits, proposals
from grpo_workload.capacity.shapes import Models, holds_step, longest, most_tokens
from grpo_workload.capacity.tensor_parallel import ratio
from grpo_workload.generation.cache_rest import sequences_of_engine
from grpo_workload.policy.model import tiles
from support.families import make_config
from support.paths import EXAMPLES

CONFIGS = Path(__file__).parent / "configs"
H100, GIB = gpu_bytes("h100"), 2**30
MODELS = Models()
BOUND = MODELS.without_passes()


def spec(model: str = "qwen2.5-7b", gpus: int = 8, replicas: int = 1, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(CONFIGS / model)},
        "dataset": {"path": "/data"},
        "rewards": [{"name": "r", "accuracy": {}}],
        "trainer": {"groups": [{"name": "a", "gpus": gpus, "replicas": replicas}]},
    } | sections


def job(fields: dict[str, Any]) -> Job:
    return Job(namespace="n", name="j", uid="u", generation=1, spec=parse_spec(fields))


def planned(fields: dict[str, Any], size: int = H100, models: Models = BOUND) -> Plan:
    return plan(contract_of(job(fields)), size, models, engine_bytes=size)


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "Colocate": {},
    "Server": {"server": {"groups": [{"name": "e", "gpus": 4, "tensorParallel": 4}]}},
    "NodeLocal": {"nodeLocal": {"gpusPerNode": 2, "enginesPerNode": 1}, "tensorParallel": 2},
}
VALUES: dict[str, list[Any]] = {
    "topology": sorted(TOPOLOGIES),
    "stage": [0, 1, 2, 3],
    "offload": ["none", "cpu", "generating"],
    "dtype": ["float32", "bfloat16", "int8"],
    "lora": [{}, {"lora": {}}],
    "beta": [0.0, 0.1],
    "level": [0, 1, 2],
    "gpus": [4, 8],
}
CHOICES = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()})


def made(choice: dict[str, Any]) -> dict[str, Any]:
    generation = {"topology": choice["topology"], "maxModelLen": 2048} | TOPOLOGIES[choice["topology"]]
    if choice["topology"] == "Colocate":
        generation |= {"colocate": {"sleepLevel": choice["level"]}}
    parallelism = {"zeroStage": choice["stage"], "offloadOptimizer": choice["offload"]}
    parallelism |= {"optimizerDtype": choice["dtype"]}
    training = {"beta": choice["beta"]}
    return spec(
        gpus=choice["gpus"], generation=generation, parallelism=parallelism, training=training, **choice["lora"]
    )


def accepted(fields: dict[str, Any]) -> bool:
    try:
        parse_spec(fields)
    except ValueError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_parts_add_up_and_none_is_negative(choice: dict[str, Any]) -> None:
    if not accepted(fields := made(choice)):
        return
    found = planned(fields)
    roles = {place.name.split()[0] for place in found.gpus}
    assert roles == ({"rank"} if choice["topology"] == "Colocate" else {"rank", "engine"})
    for place in found.places:
        assert set(place.phases) <= set(PHASES)
        assert min(size for parts in place.phases.values() for size in parts.values()) >= 0
        assert place.peak == max(sum(parts.values()) for parts in place.phases.values())


@settings(max_examples=40, deadline=None)
@given(CHOICES)
def test_more_ranks_and_smaller_models_never_need_more(choice: dict[str, Any]) -> None:
    if not accepted(fields := made(choice)):
        return

    def need(changed: dict[str, Any]) -> int:
        return max(place.peak for place in planned(fields | changed).gpus if place.name.startswith("rank"))

    groups = [{"name": "a", "gpus": choice["gpus"], "replicas": 2}]
    assert need({"trainer": {"groups": groups}}) <= need({})
    assert need({}) <= need({"model": {"path": str(CONFIGS / "qwen2.5-72b")}})


@settings(max_examples=40, deadline=None)
@given(CHOICES, st.integers(16, 300))
def test_what_fits_also_fits_a_larger_gpu(choice: dict[str, Any], gib: int) -> None:
    fields = made(choice)
    if accepted(fields) and planned(fields, gib * GIB).fits:
        fields["generation"] |= {"kvCacheMemory": "1Gi"}  # a share grows with the GPU
        assert planned(fields, 2 * gib * GIB).fits or not planned(fields, gib * GIB).fits


@cache
def tiny_passes() -> tuple[dict[str, Any], Plan, list[Any]]:
    generation = {"maxModelLen": 4096, "gpuMemoryUtilization": 0.3}
    training = {"maxCompletionLength": 2048}
    fields = spec(gpus=1, parallelism={"zeroStage": 2}, generation=generation, training=training)
    here = job(fields)

    def all_of(contract: Any, models: Models) -> Plan:
        return plan(contract, H100, models, engine_bytes=H100)

    found = proposals(edits(here, fields), all_of, MODELS)
    return fields, planned(fields, models=MODELS), found


def test_every_proposal_fits_and_is_one_edit_that_the_spec_accepts() -> None:
    fields, found, proposed = tiny_passes()
    assert not found.fits
    assert found.unknown is None
    assert len(proposed) == 3
    assert len({one.edit[0] for one in proposed}) == 3
    for one in proposed:
        again = planned(edited(fields, one.edit), models=MODELS)
        assert again.is_safe
        assert again.tightest.peak == one.plan.tightest.peak
    changing = [one.edit[0] == "lora" for one in proposed]
    assert changing == sorted(changing)


def test_a_rank_refuses_what_cannot_fit_in_each_topology() -> None:
    for topology, own in TOPOLOGIES.items():
        fields = spec("qwen2.5-72b", generation={"topology": topology, "maxModelLen": 2048} | own)
        with pytest.raises(ConfigError, match=r"rank 0 \(j-a-0\) (needs|lacks) \d+\.\d GiB"):
            check_fit(contract_of(job(fields)), H100, BOUND)


def test_what_a_forecast_may_be_wrong_about_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    contract = contract_of(job(spec(generation={"kvCacheMemory": "4Gi"})))
    peak = max(place.peak for place in plan(contract, H100, BOUND).gpus)
    with caplog.at_level("WARNING"):
        assert not check_fit(contract, int(peak / 1.08), BOUND).fits
    assert "It begins nevertheless: this is a forecast" in caplog.text
    with pytest.raises(CannotFitError, match=r"needs \d+\.\d GiB"):
        check_fit(contract, int(peak / 1.12), BOUND)


def test_no_length_of_sequences_ends_a_job(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts may be far shorter than generation.maxModelLen; ranks try what there is."""
    fields = spec(generation={"maxModelLen": 16384}, parallelism={"zeroStage": 3})
    with caplog.at_level("WARNING"):
        assert not check_fit(contract_of(job(fields)), H100, MODELS).fits
    assert "activations" in caplog.text


@pytest.mark.parametrize("lora", [{}, {"lora": {}}])
def test_a_warning_takes_one_model_and_no_pass_of_an_edit(
    lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()

    def count(module: Any, name: str) -> None:
        known = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: (calls.update([name]), known(*args, **kwargs))[1])

    count(shapes, "empty_model")
    count(meta_pass, "empty_model")
    count(shapes, "activations")
    fields = spec(generation={"maxModelLen": 16384}, parallelism={"zeroStage": 3}) | lora
    assert not check_fit(contract_of(job(fields)), H100 * 9 // 10, Models()).fits
    assert calls == {"empty_model": 1, "activations": 2}  # one sequence, and the largest micro-batch


def test_passes_of_one_model_are_those_of_models_of_their_own() -> None:
    kept = Models()
    for checkpointing in (False, True, False):
        parallelism = {"zeroStage": 1, "gradientCheckpointing": checkpointing}
        training = {"promptsPerStep": 1, "numGenerations": 2, "maxCompletionLength": 256}
        fields = spec(gpus=1, generation={"maxModelLen": 512}, parallelism=parallelism, training=training)
        assert planned(fields, models=kept) == planned(fields, models=Models())


def test_a_share_that_holds_no_sequence_is_named(caplog: pytest.LogCaptureFixture) -> None:
    fields = spec(generation={"gpuMemoryUtilization": 0.15, "maxModelLen": 4096}, parallelism={"zeroStage": 3})
    assert not check_fit(contract_of(job(fields | {"lora": {}})), H100, BOUND).fits  # vLLM would refuse it
    assert re.search(r"vLLM's share of the GPU .* lacks .*KV cache of one sequence", caplog.text)
    assert "grpo plan shows all parts, and what would fit" in caplog.text


def test_a_model_that_does_not_run_on_the_meta_device_is_planned_without_activations(tmp_path: Path) -> None:
    make_config("gpt_oss").save_pretrained(tmp_path)
    found = planned(spec(model=str(tmp_path), gpus=1), models=Models())
    assert found.fits
    assert "activations" not in found.gpus[0].phases["forward+backward"]
    assert str(found.unknown).startswith("NotImplementedError: ")


def test_edits_of_a_rank_leave_the_layout_as_it_is() -> None:
    names = {edit[0] for edit, _ in own_edits(contract_of(job(spec())))}
    assert {"parallelism.zeroStage", "generation.tensorParallel", "lora"} <= names
    assert "generation.gpuMemoryUtilization" not in names  # the cache takes what is left anyway
    assert not {name for name in names if name.startswith("trainer")}
    split = {edit[1] for edit, _ in own_edits(contract_of(job(spec(gpus=6)))) if edit[0] == "generation.tensorParallel"}
    assert split == {2}  # ranks of one pod share a copy
    served = contract_of(job(spec(generation={"topology": "Server"} | TOPOLOGIES["Server"])))
    assert "generation.tensorParallel" not in {edit[0] for edit, _ in own_edits(served)}


def test_an_edit_changes_one_value_of_a_copy() -> None:
    before = {"trainer": {"groups": [{"gpus": 1}, {"gpus": 2}]}, "lora": None}
    assert edited(before, ("trainer.groups[1].replicas", 4))["trainer"]["groups"][1] == {"gpus": 2, "replicas": 4}
    assert edited(before, ("lora.loadIn4Bit", True))["lora"] == {"loadIn4Bit": True}
    assert before == {"trainer": {"groups": [{"gpus": 1}, {"gpus": 2}]}, "lora": None}


def test_uneven_groups_have_a_place_each_and_hosts_by_their_gpus() -> None:
    groups = [{"name": "a", "gpus": 7}, {"name": "b", "gpus": 8, "replicas": 2}]
    fields = spec(trainer={"groups": groups}, parallelism={"offloadOptimizer": "cpu", "zeroStage": 3})
    found = planned(fields)
    assert [place.name for place in found.gpus] == ["rank 0 (j-a-0)", "rank 7 (j-b-0)"]
    hosts = [place.phases["forward+backward"]["offloaded states"] for place in found.places if place.is_host]
    assert hosts[0] * 8 == hosts[1] * 7


def test_only_the_rank_that_reads_stacks_experts_whatever_the_stage(tmp_path: Path) -> None:
    make_config("qwen3_moe").save_pretrained(tmp_path)
    for stage in (0, 3):
        fields = spec() | {"model": {"path": str(tmp_path)}, "parallelism": {"zeroStage": stage}}
        found = planned(fields | {"trainer": {"groups": [{"name": "a", "gpus": 8}, {"name": "b", "gpus": 8}]}})
        first, other = (place.phases["load"]["stacked experts"] for place in found.places if place.is_host)
        stacked = BOUND.shapes(contract_of(job(fields)).config).stacked
        assert (first, other) == (2 * stacked // 2, 0), "bfloat16, one of two layers"


def test_a_pods_memory_limit_and_its_node_selector_are_read() -> None:
    fields = spec(parallelism={"offloadOptimizer": "cpu", "zeroStage": 3})
    selector = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    template = {"resources": {"limits": {"memory": "100Gi"}}, "nodeSelector": selector}
    here = job(fields | {"podTemplate": template})
    limits, gpus = pod_sizes(here)
    assert (limits, gpus) == ({"a": 100 * GIB}, {"a": H100})
    found = plan(contract_of(here), H100, BOUND, host_bytes=limits)
    assert (found.tightest.is_host, found.fits) == (True, False)


def test_gpus_are_known_by_name_size_and_label() -> None:
    assert all(gpu_bytes(name.upper()) == gpu_bytes(name) > 20 * GIB for name in MEMORY)
    assert gpu_bytes("80Gi") == 80 * GIB
    labels = {"A100-SXM4-40GB": "a100-40", "A100-SXM4-80GB": "a100-80", "H200": "h200", "L40S": "l40s", "L4": "l4"}
    for product, name in (labels | {"GeForce-RTX-4090": "rtx4090", "H100-PCIe": "h100"}).items():
        assert bytes_of_node({"nvidia.com/gpu.product": f"NVIDIA-{product}"}) == gpu_bytes(name)
    for other in ("H100-NVL", "H100-SXM5-96GB", "H100-80GB-HBM3-SHARED", "H100-80GB-HBM3-MIG-3g.40gb"):
        assert bytes_of_node({"nvidia.com/gpu.product": f"NVIDIA-{other}"}) is None, "of another size, or shared"
    assert bytes_of_node({"nvidia.com/gpu.memory": "81559"}) == pytest.approx(H100, rel=0.01)
    assert bytes_of_node({"other": "label"}) is None


def test_longest_sequences_and_micro_batches_follow_the_job() -> None:
    def tokens(**training: Any) -> tuple[int, int, int]:
        fields = spec("qwen2.5-72b", generation={"maxModelLen": 1000}, training=training)
        contract = contract_of(job(fields))
        shapes = MODELS.shapes(contract.config)
        return longest(contract, shapes), most_tokens(contract, shapes), planned(fields).tokens

    assert tokens() == (1000, 8000, 1000)
    assert tokens(maxTokensPerMicroBatch=4096) == (1000, 8000, 4096)
    assert tokens(perDeviceTrainBatchSize=1) == (1000, 1000, 1000)


def test_ranks_that_share_sequences_divide_activations() -> None:
    def passes(length: int, sequence: int) -> dict[str, int]:
        parallelism = {"gradientCheckpointing": True, "sequence": sequence}
        fields = spec("qwen2.5-0.5b", gpus=6, generation={"maxModelLen": length}, parallelism=parallelism)
        return planned(fields, models=MODELS).gpus[0].phases["forward+backward"]

    alone, shared = passes(16_384, 1), passes(32_768, 2)
    added = {"exchanged heads": 2 * 2 * 64 * (14 + 2 * 2) * 16_384, "NCCL": 2 * alone["NCCL"]}
    assert shared == alone | added
    edits = {edit for edit, _ in own_edits(contract_of(job(spec(gpus=6)))) if edit[0] == "parallelism.sequence"}
    assert edits == {("parallelism.sequence", size) for size in (2, 3, 6)}


@pytest.mark.parametrize(
    ("training", "tokens", "is_whole"),
    [
        ({"promptsPerStep": 32, "maxTokensPerMicroBatch": 65536}, 65536, True),
        ({"promptsPerStep": 32, "maxTokensPerMicroBatch": 100_000}, 65536, True),  # more than there are
        ({"promptsPerStep": 32, "maxTokensPerMicroBatch": 65535}, 65535, False),
        ({"promptsPerStep": 64, "maxTokensPerMicroBatch": 65536}, 65536, False),  # the step is twice as long
        ({"promptsPerStep": 32, "perDeviceTrainBatchSize": 1}, 1024, False),
        ({"promptsPerStep": 1, "numGenerations": 2, "perDeviceTrainBatchSize": 2}, 1024, False),
    ],
)
def test_gradients_of_micro_batches_before_count_unless_one_holds_the_step(
    training: dict[str, Any], tokens: int, is_whole: bool
) -> None:
    sizes = {"numGenerations": 2, "maxCompletionLength": 512} | training
    fields = spec(gpus=1, generation={"maxModelLen": 1024}, parallelism={"zeroStage": 0}, training=sizes)
    found, contract = planned(fields), contract_of(job(fields))
    assert found.tokens == tokens
    assert holds_step(contract, MODELS.shapes(contract.config), tokens) == is_whole
    gradients = found.gpus[0].phases["forward+backward"]["gradients"]
    assert gradients == (0 if is_whole else 2 * MODELS.shapes(contract.config).own)


def test_tensor_to_data_parallel_is_compared_above_20_billion_parameters() -> None:
    small, large = (contract_of(job(spec(name, replicas=4))) for name in ("qwen2.5-7b", "qwen2.5-72b"))
    found = ratio(large, MODELS)
    assert found is not None
    assert found.tensor * found.data == 32
    assert (found.alone_bytes > found.split_bytes) == (found.tokens < found.even_tokens)
    assert "tensor to data parallel 8:4 beside ZeRO-3 alone" in str(found)
    assert ratio(small, MODELS) is None
    one = small.members[0].model_copy(update={"gpus": 1})
    assert ratio(small.model_copy(update={"members": (one,)}), MODELS) is None


def test_the_order_prefers_what_moves_less() -> None:
    def seconds(**parallelism: Any) -> float:
        contract = contract_of(job(spec("qwen2.5-72b", gpus=8, replicas=4, parallelism=parallelism)))
        return step_seconds(contract, plan(contract, H100, BOUND), MODELS.shapes(contract.config))

    plain = seconds(zeroStage=2)
    assert plain < seconds(zeroStage=3) < seconds(zeroStage=3, offloadOptimizer="cpu")
    assert plain < seconds(zeroStage=2, gradientCheckpointing=True)


def test_examples_can_be_read_for_a_plan() -> None:
    fields = yaml.safe_load((EXAMPLES / "uneven-8-nodes.yaml").read_text())["spec"]
    fields["model"] = {"path": str(CONFIGS / "qwen2.5-7b")}
    assert len(planned(fields).gpus) == 3


def test_a_line_between_two_passes_never_says_less_than_a_pass() -> None:
    fields = spec(gpus=1, generation={"maxModelLen": 1024}, parallelism={"gradientCheckpointing": True})
    contract = contract_of(job(fields | {"training": {"promptsPerStep": 64, "numGenerations": 2}}))
    assert (longest(contract, MODELS.shapes(contract.config)), tiles.TILE) == (1024, 8192)
    for tokens in (4096, 8000, 8192, 9000, 20_000, 50_000):
        (exact, line) = (MODELS.activations(contract, tokens, by_line=by_line) for by_line in (False, True))
        assert exact is not None
        assert line is not None
        assert sum(exact[:2]) <= sum(line[:2]) < 1.15 * sum(exact[:2]), tokens


def test_sequences_of_any_length_are_planned_whole(tmp_path: Path) -> None:
    make_config("qwen3", max_position_embeddings=300_000).save_pretrained(tmp_path)
    parallelism = {"gradientCheckpointing": True}

    def of_length(length: int) -> Plan:
        training = {"maxCompletionLength": length - 1}
        generation = {"maxModelLen": length}
        fields = spec(str(tmp_path), gpus=1, parallelism=parallelism, generation=generation, training=training)
        return planned(fields, models=MODELS)

    found = [of_length(length) for length in (100_000, 200_000)]
    assert [one.tokens for one in found] == [100_000, 200_000]
    few, many = (one.gpus[0].phases["forward+backward"]["activations"] for one in found)
    assert 1.8 * few < many


def test_a_cache_without_a_size_takes_what_training_leaves_up_to_what_a_step_can_use() -> None:
    def found(**generation: Any) -> tuple[dict[str, int], Plan]:
        own = {"maxModelLen": 32_768} | generation
        fields = spec(gpus=1, parallelism=parallelism, training=training, generation=own)
        made = planned(fields)
        return made.gpus[0].phases["generate"], made

    parallelism: dict[str, Any] = {"zeroStage": 0, "optimizerDtype": "bfloat16", "offloadOptimizer": "generating"}
    training = {"promptsPerStep": 8, "numGenerations": 8}
    rest, made = found()
    assert made.is_safe, "what is left beside the cache is what a plan has to leave"
    assert 0.89 * H100 < sum(rest.values()) <= 0.92 * H100
    share, _ = found(gpuMemoryUtilization=0.3)
    assert rest["KV cache"] > 4 * share["KV cache"]
    training |= {"promptsPerStep": 1, "numGenerations": 2}
    few, _ = found()
    token = MODELS.shapes(contract_of(job(spec())).config).cache_bytes(1, 2)
    assert few["KV cache"] == 3 * 32_768 * token
    parallelism["offloadOptimizer"] = "none"
    assert found()[0]["KV cache"] <= few["KV cache"]


def test_an_engine_samples_what_its_ranks_train_on_and_more_steps_with_staleness() -> None:
    def count(tensor_parallel: int, **training: Any) -> int:
        fields = spec(gpus=4, generation={"maxModelLen": 2048, "tensorParallel": tensor_parallel}, training=training)
        return sequences_of_engine(contract_of(job(fields)))

    assert count(1, promptsPerStep=16, numGenerations=4) == 16
    assert count(2, promptsPerStep=16, numGenerations=4) == 32
    assert count(1, promptsPerStep=18, numGenerations=4) == 20, "some rank has five prompts"
    assert count(1, promptsPerStep=16, numGenerations=4, maxStaleness=1) == 32
    assert count(1, promptsPerStep=16, numGenerations=4, stepsPerGeneration=3) == 48, "batches are sampled together"
    assert count(1, promptsPerStep=16, numGenerations=4, numIterations=3) == 16
    assert count(1, promptsPerStep=1, numGenerations=4) == 4, "ranks without a prompt wait"


def test_an_engine_has_room_for_the_samples_of_an_evaluation() -> None:
    def count(**evaluation: Any) -> int:
        training = {"promptsPerStep": 4, "numGenerations": 4}
        fields = spec(gpus=2, generation={"maxModelLen": 2048}, training=training)
        section = {"dataset": {"name": "org/problems"}, "everySteps": 5} | evaluation
        return sequences_of_engine(contract_of(job(fields | {"evaluation": section})))

    assert count(maxPrompts=4) == 8, "those of a step are more"
    assert count(maxPrompts=101, numGenerations=3) == 51 * 3
    assert count() >= 1024, "as many as vLLM samples at once, where the dataset alone says how many there are"
