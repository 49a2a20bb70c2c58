"""Manifests of examples/ render and place ranks and engines where their first lines say. The quickstarts bring their
claims and train one task, and README shows one of them. Later examples bring all that they name, and fit by the plan.
"""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce

import pytest
import yaml

from grpo_cli.documents.manifest import load_job
from grpo_cli.local.edited import contract_of
from grpo_operator.api.crd import crd
from grpo_operator.api.names import Condition, Role
from grpo_operator.api.progress_status import ProgressStatus
from grpo_operator.api.spec import parse_spec
from grpo_operator.api.status import GroupStatus, GRPOJobStatus
from grpo_operator.decide.conditions import conclude, set_condition
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.topology import plan_topology
from grpo_spec.gpus import gpu_bytes
from grpo_spec.reasons import Reason
from grpo_spec.schema import dump
from grpo_workload.capacity.plan import plan
from grpo_workload.capacity.shapes import Models
from support.documents import blocks
from support.paths import EXAMPLES, ROOT

NOW = datetime(2026, 1, 1, tzinfo=UTC)

# file: number of ranks, ranks of each pod, (tensor parallel size, devices) of each engine, ranks that send weights
EXPECTED = {
    "quickstart.yaml": (3, [2, 1], [], []),
    "quickstart-cpu.yaml": (1, [1], [], []),
    "quickstart-gpu.yaml": (3, [2, 1], [], []),
    "nodelocal-4x7+1.yaml": (28, [7] * 4, [(1, (7,))] * 4, [0, 7, 14, 21]),
    "uneven-8-nodes.yaml": (63, [7, *[8] * 7], [(1, tuple(range(8)))] * 2, [0]),
    "one-node-4+1.yaml": (4, [4], [(1, (4,))], [0]),
    "colocate-7b-tp.yaml": (8, [8], [], []),
    "colocate-7b-lora.yaml": (8, [8], [], []),
    "colocate-vision.yaml": (8, [8], [], []),
    "colocate-72b-zero3-offload.yaml": (32, [8] * 4, [], []),
    "custom-reward/job.yaml": (8, [8], [], []),
    "calculator/job.yaml": (1, [1], [], []),
    "qwen3-math.yaml": (8, [8], [], []),
    "dapo.yaml": (8, [8], [], []),
    "tldr.yaml": (1, [1], [], []),
    "code-tests.yaml": (8, [8], [], []),
    "function-calls.yaml": (8, [8], [], []),
    "judge.yaml": (2, [2], [], []),
    "reward-model.yaml": (2, [2], [], []),
    "one-24gb-gpu.yaml": (1, [1], [], []),
    "one-80gb-gpu.yaml": (1, [1], [], []),
    "thinking-128k.yaml": (8, [8], [], []),
    "two-nodes-32b.yaml": (16, [8, 8], [], []),
    "moe-30b-a3b.yaml": (8, [8], [], []),
    "gpt-oss-20b.yaml": (8, [8], [], []),
    "server-elastic.yaml": (8, [8], [(1, (0,))] * 6, [0]),
}

GIB = 2**30
CONFIGS = ROOT / "tests/unit/workload/capacity/configs"

# file: folder of the model's config.json, GPU
PLANNED = {
    "qwen3-math.yaml": ("qwen3-4b", "h100"),
    "dapo.yaml": ("qwen2.5-7b", "h100"),
    "tldr.yaml": ("qwen2.5-0.5b", "l4"),
    "code-tests.yaml": ("qwen2.5-7b", "h100"),
    "function-calls.yaml": ("qwen3-4b", "h100"),
    "judge.yaml": ("qwen2.5-1.5b", "h100"),
    "reward-model.yaml": ("qwen2.5-1.5b", "h100"),
    "one-24gb-gpu.yaml": ("qwen2.5-3b", "l4"),
    "one-80gb-gpu.yaml": ("qwen2.5-3b", "h100"),
    "thinking-128k.yaml": ("qwen3-4b-2507", "h100"),
    "two-nodes-32b.yaml": ("qwen2.5-32b", "h100"),
    "moe-30b-a3b.yaml": ("qwen3-30b-a3b", "h100"),
    "gpt-oss-20b.yaml": ("gpt-oss-20b", "h100"),
    "server-elastic.yaml": ("qwen2.5-7b", "h100"),
}


def test_every_example_is_listed_here_and_on_their_page() -> None:
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml")} == set(EXPECTED)
    assert set(re.findall(r"\(([^()]+\.yaml)\)", (EXAMPLES / "README.md").read_text())) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_renders_rank_by_rank(name: str) -> None:
    job = load_job(EXAMPLES / name).job("default")
    contract = make_contract(job, plan_topology(job), 0)
    ranks, each, engines, senders = EXPECTED[name]
    assert [m.rank_offset + local for m in contract.members for local in range(m.gpus)] == list(range(ranks))
    assert [m.gpus for m in contract.members] == each
    assert [(e.tensor_parallel, e.devices) for e in contract.engines] == engines
    assert [t.sender for t in contract.transfers] == senders
    assert "hostPath" not in (EXAMPLES / name).read_text()


@pytest.mark.parametrize(
    ("name", "mode", "device"),
    [
        ("quickstart.yaml", "ReadWriteMany", "cpu"),
        ("quickstart-cpu.yaml", "ReadWriteOnce", "cpu"),
        ("quickstart-gpu.yaml", "ReadWriteMany", "cuda"),
    ],
)
def test_a_quickstart_is_applied_as_it_is(name: str, mode: str, device: str) -> None:
    """Its claim comes with it and can be mounted by all its pods, from the cluster's default storage class."""
    claim, job = yaml.safe_load_all((EXAMPLES / name).read_text())
    spec = parse_spec(job["spec"])
    assert spec.storage.claim_name == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == [mode]
    assert len(spec.trainer.groups) == (1 if mode == "ReadWriteOnce" else 2)
    assert "storageClassName" not in claim["spec"]
    assert spec.device.type == device
    assert ("image" in job["spec"]) == (name == "quickstart-cpu.yaml"), "the others run the release's image"


def test_all_quickstarts_train_the_same_task() -> None:
    first, *others = [load_job(EXAMPLES / name).spec for name in EXPECTED if name.startswith("quickstart")]
    without = {"per_device_train_batch_size": None}
    for spec in others:
        assert spec.model.name == first.model.name
        assert (spec.dataset, spec.rewards, spec.evaluation) == (first.dataset, first.rewards, first.evaluation)
        assert spec.training.model_copy(update=without) == first.training.model_copy(update=without)
    assert len(others) == 2


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.mark.parametrize("name", PLANNED)
def test_an_example_fits_by_the_plan_that_its_head_quotes(name: str, models: Models) -> None:
    model, gpu = PLANNED[name]
    job = load_job(EXAMPLES / name).job("default")
    described = job.spec.model.model_copy(update={"name": None, "path": str(CONFIGS / model)})
    contract = contract_of(replace(job, spec=job.spec.model_copy(update={"model": described})))
    found = plan(contract, gpu_bytes(gpu), models)
    assert found.fits
    peaks = {phase: sum(parts.values()) for phase, parts in found.gpus[0].phases.items()}
    phase = max(peaks, key=peaks.__getitem__)
    of, most = gpu_bytes(gpu) / GIB, peaks[phase] / GIB
    assert f"\n# Plan: {most:.0f} of {of:.0f} GiB at most ({phase}, --gpu {gpu}).\n" in (EXAMPLES / name).read_text()


@pytest.mark.parametrize("name", PLANNED)
def test_an_example_brings_all_that_it_names(name: str) -> None:
    """Claims, ConfigMaps, Services; a Secret by a command at its head."""
    text = (EXAMPLES / name).read_text()
    documents = list(yaml.safe_load_all(text))
    made = {(one["kind"], one["metadata"]["name"]) for one in documents}
    (job,) = [one for one in documents if one["kind"] == "GRPOJob"]
    spec = parse_spec(job["spec"])
    wanted = {("PersistentVolumeClaim", spec.storage.claim_name)}
    wanted |= {("ConfigMap", one["configMap"]["name"]) for one in spec.pod_template.volumes or ()}
    hosts = re.findall(r"http://([a-z-]+):", json.dumps(dump(spec)))
    assert wanted | {("Service", host) for host in hosts} <= made
    for variable in spec.pod_template.env or ():
        if variable.value_from is not None:
            assert f"# Begin: kubectl create secret generic {variable.value_from['secretKeyRef']['name']} " in text
    assert f"kubectl apply -f examples/{name}\n" in text


def test_the_custom_image_holds_the_module_that_its_job_names() -> None:
    dockerfile = (EXAMPLES / "custom-reward/Dockerfile").read_text()
    assert "COPY gsm8k.py /opt/mine/" in dockerfile
    assert "ENV PYTHONPATH=/opt/mine" in dockerfile
    assert (EXAMPLES / "custom-reward/gsm8k.py").exists()


def test_the_readme_shows_a_job_of_examples_and_what_kubectl_prints_for_it() -> None:
    """The header is made of the CRD's columns, and the row of the status that the operator would write."""
    readme = ROOT / "README.md"
    (text,) = [block.text for block in blocks(readme) if block.language == "yaml"]
    assert (ROOT / "examples/quickstart-gpu.yaml").read_text().endswith(f"---\n{text}")
    shown = next(block.text for block in blocks(readme) if "kubectl get grpojobs\n" in block.text)
    header, row = shown.splitlines()[-2:]

    job = yaml.safe_load(text)
    spec = parse_spec(job["spec"])
    pods = [
        GroupStatus(name=group.name, role=Role.TRAINER, desired=group.replicas, ready=group.replicas)
        for group in spec.trainer.groups
    ]
    progress = ProgressStatus(step=12, total_steps=spec.training.max_steps, reward=0.641, time=NOW)
    status = GRPOJobStatus(groups=tuple(pods), progress=progress)
    for kind in (Condition.ACCEPTED, Condition.SCHEDULED, Condition.RUNNING):
        status = set_condition(status, kind, True, Reason.ALL_RANKS_RUNNING, "", generation=1, now=NOW)
    status = conclude(status, spec.generation.topology, generation=1, now=NOW)
    values = {"status": dump(status), "metadata": job["metadata"]}
    columns = [one for one in crd()["spec"]["versions"][0]["additionalPrinterColumns"] if not one.get("priority")]
    assert header.split() == ["NAME", *(column["name"].upper() for column in columns)]
    printed = [reduce(dict.__getitem__, one["jsonPath"].split(".")[1:], values) for one in columns[:-1]]
    assert row.split()[:-1] == [job["metadata"]["name"], *map(str, printed)], "all but the age"
