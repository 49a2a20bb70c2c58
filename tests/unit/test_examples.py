"""Every manifest of examples/ renders, and places every rank and engine where its first lines say."""

import os
from pathlib import Path

import pytest

from grpo_cli.manifest import load_job
from grpo_operator.topology import make_contract, plan_topology
from grpo_workload.prompt_making import Preprocess
from grpo_workload.reward_process import RewardProcess

EXAMPLES = Path(__file__).parents[2] / "examples"

# file: ranks, ranks of each pod, (tensor parallel, devices) of each engine, senders of weights
EXPECTED = {
    "quickstart.yaml": (3, [2, 1], [], []),
    "nodelocal-4x7+1.yaml": (28, [7] * 4, [(1, (7,))] * 4, [0, 7, 14, 21]),
    "uneven-8-nodes.yaml": (63, [7, *[8] * 7], [(1, tuple(range(8)))] * 2, [0]),
    "one-node-4+1.yaml": (4, [4], [(1, (4,))], [0]),
    "colocate-7b-tp.yaml": (8, [8], [], []),
    "colocate-7b-lora.yaml": (8, [8], [], []),
    "colocate-72b-zero3-offload.yaml": (32, [8] * 4, [], []),
    "custom-reward/job.yaml": (8, [8], [], []),
}


def test_every_example_is_listed_here() -> None:
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_renders_rank_by_rank(name: str) -> None:
    job = load_job(EXAMPLES / name, "default")
    contract = make_contract(job, plan_topology(job), 0)
    ranks, each, engines, senders = EXPECTED[name]
    assert [m.rank_offset + local for m in contract.members for local in range(m.gpus)] == list(range(ranks))
    assert [m.gpus for m in contract.members] == each
    assert [(e.tensor_parallel, e.devices) for e in contract.engines] == engines
    assert [t.sender for t in contract.transfers] == senders


def test_the_custom_functions_do_what_their_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EXAMPLES / "custom-reward"
    monkeypatch.syspath_prepend(folder)
    spec = load_job(folder / "job.yaml", "default").spec
    assert spec.dataset.preprocess is not None
    row = {"question": "Ann has 48 clips and half as many pins. How many?", "answer": "48 / 2 = 24 pins.\n48 + 24 = 72.\n#### 1,072"}
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


def test_the_custom_image_holds_the_module_that_its_job_names() -> None:
    dockerfile = (EXAMPLES / "custom-reward/Dockerfile").read_text()
    assert "COPY gsm8k.py /opt/mine/" in dockerfile
    assert "ENV PYTHONPATH=/opt/mine" in dockerfile
    assert (EXAMPLES / "custom-reward/gsm8k.py").exists()
