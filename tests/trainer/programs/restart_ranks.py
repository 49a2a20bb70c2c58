"""Ranks on engines that come back: rank 1 alone has prompts, and gets answers only after both ranks have brought weights together."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from grpo_workload.collectives import join
from grpo_workload.contract import Contract, Device
from grpo_workload.generation.engine_link import Timing
from grpo_workload.generation.server import ServerGenerator
from grpo_workload.packing import TensorSpec
from grpo_workload.types import Prompt


@record
def main(folder: Path) -> None:
    contract = Contract.model_validate_json((folder / "contract.json").read_text())
    join(Device.CPU, contract.timeout_seconds)
    rank = dist.get_rank()
    pushes = []

    class Ones:
        specs = (TensorSpec("weight", torch.float32, (1,)),)

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            ones = torch.ones(1)
            dist.all_reduce(ones)  # as gathering a partitioned parameter is
            pushes.append(int(ones))
            yield "weight", ones

    generator = ServerGenerator(contract, rank, Ones, Timing(look=0.2, lost=1))
    prompts = [Prompt(index=index, text="", token_ids=(index,), seed=index) for index in range(6 * rank)]
    groups = generator.generate(prompts, 2)
    generator.close()
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"pushes": pushes, "tokens": [[one.token_ids for one in group] for group in groups]})
    )


main(Path(sys.argv[1]))
