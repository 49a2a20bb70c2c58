"""Every topology samples, evaluates and learns the same, on one, two or three ranks."""

import shutil
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_spec.generation import Topology
from support.trainer.engines import Engines, make_contract, with_ranks

pytestmark = pytest.mark.vllm

RANKS = {Topology.SERVER: 1, Topology.NODE_LOCAL: 3, Topology.COLOCATE: 2}
"""The step has two prompts, so one rank of NodeLocal has none and trains on samples of the others.

Server first: its push leaves trained weights in the engine, so NodeLocal's first push is seen if it does nothing.
"""


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model with larger weights in its layers: without them it repeats the last token, whatever the prompt."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("model") / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.layers.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2, generator=random)
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """The contract of a running engine, with a trainer pod of one rank."""
    contract = make_contract(model, [(1, 1)])
    # The samples' log-probabilities are invented, so a correction would mask most sequences.
    changes = {"learning_rate": 1e-3, "num_generations": 4, "importance_sampling_correction": "none"}
    # AdamW moves a weight by the learning rate even if its gradient is rounding alone, which differs by topology.
    changes["adam_epsilon"] = 1e-5
    training = contract.config.training.model_copy(update=changes)
    contract = contract.model_copy(update={"config": contract.config.model_copy(update={"training": training})})
    pods = Engines(tmp_path_factory.mktemp("engine"), contract)
    with pods.running():
        yield contract


def placed(server, topology):
    """Return the same job in another topology.

    NodeLocal: the engine runs in the trainer's pod, next to three ranks under ZeRO-3. Colocate: two ranks hold an
    engine together, under tensor parallelism.
    """
    contract = with_ranks(server, RANKS[topology])
    changes: dict[str, Any] = {"topology": topology}
    parallelism = contract.config.parallelism
    match topology:
        case Topology.NODE_LOCAL:
            (member,), (engine,) = contract.members, contract.engines
            contract = contract.model_copy(
                update={"engines": (engine.model_copy(update={"pod": member.pod, "group": member.group}),)}
            )
            parallelism = parallelism.model_copy(update={"zero_stage": 3})
        case Topology.COLOCATE:
            contract = contract.model_copy(update={"engines": (), "transfers": ()})
            changes["tensor_parallel"] = 2
    generation = contract.config.generation.model_copy(update=changes)
    config = contract.config.model_copy(update={"generation": generation, "parallelism": parallelism})
    return contract.model_copy(update={"config": config})


def test_every_topology_samples_and_learns_the_same(server, run_program, tmp_path):
    results = {}
    for topology, ranks in RANKS.items():
        path = tmp_path / f"{topology}.json"
        path.write_text(placed(server, topology).model_dump_json(by_alias=True))
        run_program("topology_step.py", ranks, path, tmp_path / f"{topology}.pt")
        results[topology] = torch.load(tmp_path / f"{topology}.pt")
        assert len(results[topology]) == ranks
        assert all(result["is_untouched"] for result in results[topology]), (
            f"{topology}: a push changed the trainer's parameters"
        )

    first = {topology: ranks[0] for topology, ranks in results.items()}
    reference = first[Topology.SERVER]
    assert {version for _, _, version in reference["before"]} == {1}
    assert all(len(set(ids)) > 3 for ids, _, _ in reference["before"]), "the answers must depend on the prompt"
    assert reference["metrics"]["grad_norm"] > 1e-3
    moved = max(
        float((weight - reference["initial"][name]).abs().max()) for name, weight in reference["weights"].items()
    )
    assert moved > 5e-4, "the first step of AdamW moves weights by about the learning rate"
    assert len(reference["evaluation"]) == 4
    assert {version for _, version in reference["evaluation"]} == {1}
    assert len({ids for ids, _ in reference["evaluation"]}) > 1, "each completion has a seed of its own"
    for topology, result in first.items():
        assert result["evaluation"] == reference["evaluation"], topology
        assert [ids for ids, _, _ in result["before"]] == [ids for ids, _, _ in reference["before"]], topology
        assert result["metrics"]["grad_norm"] == pytest.approx(reference["metrics"]["grad_norm"], abs=1e-5), topology
        assert result["weights"].keys() == reference["weights"].keys()
        for parameter, weight in reference["weights"].items():
            difference = float((result["weights"][parameter] - weight).abs().max())
            assert difference < 1e-5, f"{topology}: {parameter} differs by {difference:.1e}"
        # Log-probabilities of the first tokens, which depend on no other sampled token.
        old, new, expected = (
            torch.tensor([logprobs[0] for _, logprobs, _ in answers])
            for answers in (result["before"], result["after"], reference["after"])
        )
        assert {version for _, _, version in result["after"]} == {2}
        assert float((new - expected).abs().max()) < 1e-4, topology
        assert float((new - old).abs().max()) > 1e-2, f"{topology}: the step did not reach the engine"
