"""Every manifest of examples/ renders, and places every rank and engine where its first lines say."""

from pathlib import Path

import pytest

from grpo_cli.manifest import load_job
from grpo_operator.topology import make_contract, plan_topology

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
}


def test_every_example_is_listed_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_renders_rank_by_rank(name: str) -> None:
    job = load_job(EXAMPLES / name, "default")
    contract = make_contract(job, plan_topology(job), 0)
    ranks, each, engines, senders = EXPECTED[name]
    assert [m.rank_offset + local for m in contract.members for local in range(m.gpus)] == list(range(ranks))
    assert [m.gpus for m in contract.members] == each
    assert [(e.tensor_parallel, e.devices) for e in contract.engines] == engines
    assert [t.sender for t in contract.transfers] == senders
