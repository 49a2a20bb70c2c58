"""`grpo check-model`. A process with torch finds out what works; here are the questions, and the answers as lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grpo_cli.errors import Exit
from grpo_cli.local.programs import ask, check_packages

if TYPE_CHECKING:
    from grpo_spec.contract import Contract

PROGRAM = "grpo_workload.check_model"
EXAMPLES = {
    "Colocate, all weights": {"generation": {"topology": "Colocate"}},
    "Colocate, LoRA": {"generation": {"topology": "Colocate"}, "lora": {}},
    "Server, all weights": {"generation": {"topology": "Server"}},
    "Server, LoRA": {"generation": {"topology": "Server"}, "lora": {"push": "adapters"}},
}
"""Settings of jobs to check a model with where no manifest is given."""
COLUMN = 24

Findings = Sequence[tuple[str, str, str]]
"""For each aspect: its name, a verdict (works, refused or unknown), and why or how."""


@click.command("check-model")
@click.argument("model", required=False)
@click.option(
    "--job",
    "manifest",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Manifest of a job: check its model with its settings; MODEL then replaces its model.",
)
@click.option("--revision", help="Branch, tag or commit of MODEL on the hub.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="GPUs that train, without --job.")
@click.option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 80Gi: the job must fit.")
def check_model(
    model: str | None, manifest: Path | None, revision: str | None, gpus: int, gpu_memory: str | None
) -> None:
    """Say what works with a model, before it is downloaded.

    MODEL is a name on the Hugging Face hub, or a folder. Only its configuration and its tokenizer are read, no weights.
    Jobs look at the same when they start. Without --job, full weights and LoRA are checked in the topologies Colocate
    and Server.

    \b
    Exit codes:
      0  the job works as far as its model's configuration shows; without --job: some kind of job does
      1  it is refused; the lines say why, and what would work
      2  the command line or the manifest is wrong, or a package is missing
    """  # noqa: D301 - click's own mark
    check_packages("check-model")
    contracts = _of_job(manifest, model, revision) if manifest else _examples(model, revision, gpus)
    found = _ask(contracts, are_examples=manifest is None, gpu_memory=gpu_memory)
    refused = [name for name, findings in found.items() if any(verdict == "refused" for _, verdict, _ in findings)]
    print(next(iter(contracts.values())).config.model.source)
    for name in found:
        print(f"{name:{COLUMN}}{'refused' if name in refused else 'works'}")
    print(*lines(found), sep="\n")
    sys.exit(Exit.FAILED if len(refused) == len(found) else Exit.OK)


def lines(found: Mapping[str, Findings]) -> list[str]:
    """Return a line for each aspect, or several with the names of those that differ in it."""
    longest_first = sorted(found.values(), key=len, reverse=True)  # it has the aspects of the others in between
    aspects = dict.fromkeys(aspect for findings in longest_first for aspect, _, _ in findings)
    made = []
    for aspect in aspects:
        named: dict[tuple[str, str], list[str]] = {}
        for name, findings in found.items():
            for own, verdict, text in findings:
                if own == aspect:
                    named.setdefault((verdict, text), []).append(name)
        for (verdict, text), names in named.items():
            where = f" ({'; '.join(names)})" if len(named) > 1 else ""
            made.append(f"{aspect:{COLUMN}}{verdict}{where}: {' '.join(text.split())}")
    return made


def _of_job(manifest: Path, model: str | None, revision: str | None) -> dict[str, Contract]:
    from grpo_cli.documents.manifest import load_job
    from grpo_operator.layout.contracts import make_contract
    from grpo_operator.layout.topology import plan_topology
    from grpo_spec.schema import dump
    from grpo_spec.trainer import TrainerConfig

    job = load_job(manifest).job("default")
    contract = make_contract(job, plan_topology(job), 0)
    if model is not None:
        fields = dump(contract.config)
        config = TrainerConfig.model_validate(with_model(fields, model, revision))
        contract = contract.model_copy(update={"config": config})
    return {job.name: contract}


def _examples(model: str | None, revision: str | None, gpus: int) -> dict[str, Contract]:
    from grpo_spec.contract import Contract

    if model is None:
        raise click.UsageError("give a MODEL, or --job with a manifest")
    common = {
        "model": _model(model, revision),
        "dataset": {"name": "any"},
        "rewards": [{"name": "any", "accuracy": {}}],
    }
    example = {
        "job": {"namespace": "default", "name": "example", "uid": "example"},
        "attempt": 0,
        "device": "cuda",
        "durable": True,
        "members": [{"pod": "example-0", "group": "example", "host": "example-0", "gpus": gpus, "rankOffset": 0}],
    }
    return {
        name: Contract.model_validate(example | {"config": common | settings}) for name, settings in EXAMPLES.items()
    }


def with_model(fields: Mapping[str, Any], model: str, revision: str | None = None) -> dict[str, Any]:
    """Return a job's fields with another model, a name on the hub or a folder, and its other settings of the model."""
    kept = {name: value for name, value in fields["model"].items() if name not in ("name", "path", "revision")}
    return {**fields, "model": kept | _model(model, revision)}


def _model(model: str, revision: str | None) -> dict[str, str]:
    is_folder = Path(model).is_dir() or model.startswith((".", "/"))
    return {"path" if is_folder else "name": model} | ({} if revision is None else {"revision": revision})


def _ask(contracts: Mapping[str, Contract], *, are_examples: bool, gpu_memory: str | None) -> dict[str, Findings]:
    from grpo_spec.schema import dump

    asked = {
        "contracts": {name: dump(contract) for name, contract in contracts.items()},
        "areExamples": are_examples,
        "gpuMemory": gpu_memory,
    }
    found: dict[str, Findings] = ask(PROGRAM, asked)
    return found
