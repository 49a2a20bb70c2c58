"""Ranks with engines that come back; only rank 1 has prompts, and both ranks push together before it gets answers.

restart_ranks.py FOLDER: FOLDER holds contract.json. Each rank writes the sum of each push's all-reduce and the tokens
of its completions there, as rank-N.json.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from grpo_spec.contract import Contract, Device
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.generator import ServerGenerator
from grpo_workload.ranks.collectives import join
from grpo_workload.weights.wire import TensorSpec


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
            dist.all_reduce(ones)  # a collective, as gathering a partitioned parameter is
            pushes.append(int(ones))
            yield "weight", ones

    generator = ServerGenerator(contract, rank, Ones, Timing(poll=0.2, lost=1))
    prompts = [Prompt(index=index, text="", token_ids=(index,), seed=index) for index in range(6 * rank)]
    groups = generator.generate(prompts, 2)
    generator.close()
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"pushes": pushes, "tokens": [[one.token_ids for one in group] for group in groups]})
    )


main(Path(sys.argv[1]))
