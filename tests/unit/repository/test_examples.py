"""Manifests of examples/ render and place ranks and engines where their first lines say. The quickstarts bring their
claims and train one task, and README shows one of them. The functions of custom-reward and of the calculator do what
their pages say.
"""

import os
from functools import reduce

import pytest
import yaml

from grpo_cli.documents.manifest import load_job
from grpo_operator.api.crd import crd
from grpo_operator.api.names import Condition, Role
from grpo_operator.api.progress_status import ProgressStatus
from grpo_operator.api.spec import parse_spec
from grpo_operator.api.status import GroupStatus, GRPOJobStatus
from grpo_operator.decide.conditions import conclude, set_condition
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.topology import plan_topology
from grpo_spec.schema import dump
from grpo_workload.data.prompt_maker import Preprocess
from grpo_workload.rewards.process import RewardProcess
from support.documents import blocks
from support.paths import EXAMPLES, ROOT

NOW = "2026-01-01T00:00:00Z"

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
}


def test_every_example_is_listed_here() -> None:
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml")} == set(EXPECTED)


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
    specs = [load_job(EXAMPLES / name).spec for name in EXPECTED if name.startswith("quickstart")]
    tasks = [
        (
            spec.model.name,
            spec.dataset,
            spec.rewards,
            spec.evaluation,
            spec.training.model_copy(update={"per_device_train_batch_size": None}),
        )
        for spec in specs
    ]
    assert tasks == [tasks[0]] * 3


def test_the_custom_functions_do_what_their_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EXAMPLES / "custom-reward"
    monkeypatch.syspath_prepend(folder)
    spec = load_job(folder / "job.yaml").spec
    assert spec.dataset.preprocess is not None
    row = {
        "question": "Ann has 48 clips and half as many pins. How many?",
        "answer": "48 / 2 = 24 pins.\n48 + 24 = 72.\n#### 1,072",
    }
    prepared = Preprocess(spec.dataset.preprocess)(0, row, seed=1)
    assert [message["role"] for message in prepared["prompt"]] == ["system", "user"]
    assert (prepared["solution"], prepared["num_steps"]) == ("1072", 2)

    (config,) = [reward for reward in spec.rewards if reward.function]
    process = RewardProcess(config, os.environ)
    process.ready()
    answers = ["24 pins.\n72 in all.\n#### 72", "Short.\n#### 72", "#### 72 it is, I think", "72"]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert process.call({"completions": completions, "num_steps": [2] * 4, "prompts": []}, 60) == [1.0, 0.5, 0.0, 0.0]
    process.close()


def test_the_calculator_brings_its_code_and_scores_the_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EXAMPLES / "calculator"
    (brought,) = [one for one in yaml.safe_load_all((folder / "job.yaml").read_text()) if one["kind"] == "ConfigMap"]
    assert brought["data"] == {"calculator.py": (folder / "calculator.py").read_text()}
    monkeypatch.syspath_prepend(folder)
    spec = load_job(folder / "job.yaml").spec
    assert spec.dataset.preprocess is not None
    prepared = Preprocess(spec.dataset.preprocess)(0, {"question": "Calculate 12 * 13.", "answer": "156"}, seed=1)
    assert prepared["answer"] == "156"
    assert prepared["prompt"][-1] == {"role": "user", "content": "What is 12 * 13?"}

    (config,) = spec.rewards
    process = RewardProcess(config, os.environ)
    process.ready()
    *calling, says = prepared["prompt"][2:5]
    completions = [[*calling, {**says, "content": "12 * 13 = 156"}], [*calling, says], calling[:1]]
    assert process.call({"completions": completions, "answer": ["156"] * 3, "prompts": []}, 60) == [1.0, 0.0, 0.0]
    process.close()


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
    status = GRPOJobStatus(
        groups=tuple(pods),
        progress=ProgressStatus(step=12, total_steps=spec.training.max_steps, reward=0.641, time=NOW),
    )
    for kind in (Condition.ACCEPTED, Condition.SCHEDULED, Condition.RUNNING):
        status = set_condition(status, kind, True, "Fine", "", generation=1, now=NOW)
    status = conclude(status, spec.generation.topology, generation=1, now=NOW)
    values = {"status": dump(status), "metadata": job["metadata"]}
    columns = [one for one in crd()["spec"]["versions"][0]["additionalPrinterColumns"] if not one.get("priority")]
    assert header.split() == ["NAME", *(column["name"].upper() for column in columns)]
    printed = [reduce(dict.__getitem__, one["jsonPath"].split(".")[1:], values) for one in columns[:-1]]
    assert row.split()[:-1] == [job["metadata"]["name"], *map(str, printed)], "all but the age"
