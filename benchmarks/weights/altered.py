"""Alter a weight on its way to a vLLM inside this process before each of 50 good pushes, and count what is refused.

Before each push, all weights of a tiny model of FAMILY change a little, as an optimizer's step changes them. Then it is
tried three times with a weight, drawn at random, that changes behind its digest: one bit, a pair by one ulp each, two
rows in each other's place. Each must be refused by the weight's name; then the push as it is must pass. Appends one
JSON line to OUTPUT.

    OMP_NUM_THREADS=1 python -m benchmarks.weights.altered --family llama --device cpu --output altered_cpu.jsonl
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from pathlib import Path
from unittest import mock

import click

from benchmarks.common.runs import about, append, set_alone
from benchmarks.weights.digests import engine
from grpo_spec.contract import Device
from grpo_workload.ranks import environment


@click.command(help=__doc__)
@click.option("--family", required=True, help="of tests/support/families.py")
@click.option("--device", type=click.Choice([one.value for one in Device]), required=True)
@click.option("--pushes", default=50, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(family: str, device: str, pushes: int, seed: int, output: Path) -> None:
    set_alone()
    environment.prepare(Device(device), os.environ)
    import torch

    from grpo_workload.generation import own_engine
    from grpo_workload.weights.differ import WeightsAlteredError
    from grpo_workload.weights.export import Export, full
    from support.families import make_model
    from support.trainer.corrupt import CHANGES, changing
    from support.trainer.tiny_model import make_tiny_tokenizer

    torch.manual_seed(seed)
    draw = random.Random(seed)
    policy = make_model(family).to(device, torch.bfloat16)
    line: dict[str, object] = about("benchmarks.weights.altered", family=family, device=device, seed=seed)
    refused, missed, passed = dict.fromkeys(CHANGES, 0), [], 0
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        make_tiny_tokenizer().save_pretrained(folder)
        generator = engine(Path(folder), Device(device), "bfloat16")
        weights = Export(full(policy), is_partitioned=False)
        generator.sync_weights(weights, 0)
        names = [spec.name for spec in weights.specs if len(spec.shape) > 1]
        for version in range(1, pushes + 1):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 1e-3 * torch.randn_like(parameter)
            for how in CHANGES:
                name = draw.choice(names)
                with mock.patch.object(own_engine, "with_sums", changing(name, how)):
                    try:
                        generator.sync_weights(weights, version)
                        said = ""
                    except WeightsAlteredError as error:
                        said = str(error)
                if re.search(rf"altered: {re.escape(name)} changed between", said):
                    refused[how] += 1
                else:
                    missed.append([version, how, name, said])
            generator.sync_weights(weights, version)
            passed += 1
        generator.close()
    line |= {"weights": len(names), "refused": refused, "missed": missed, "passed": passed}
    append(output, line)
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
