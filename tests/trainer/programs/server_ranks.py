"""Ranks with real engines: they push, sample, compare, and push until an engine is lost: server_ranks.py FOLDER.

FOLDER holds contract.json. Each rank writes its result there as rank-N.json before it goes on pushing.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM

from grpo_spec.contract import Contract
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.generation.servers.generator import ServerGenerator
from support.trainer.engines import change, own_logprobs, weights_of
from support.trainer.stops import are_stopped, word_in


@record
def main(folder: Path) -> None:
    contract = Contract.model_validate_json((folder / "contract.json").read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(contract.config.model.source, dtype=torch.float32).eval()
    change(model, seed=3)
    weights = weights_of(model)
    generator = ServerGenerator(contract, rank, lambda: weights)
    generator.sync_weights(weights, 7)
    prompt = Prompt(index=rank, text="", token_ids=(10 + rank, 20, 30))
    (group,) = generator.generate([prompt], 2)
    is_close = all(
        torch.allclose(own_logprobs(model, prompt, one), torch.tensor(one.logprobs), atol=1e-4, rtol=0) for one in group
    )
    (whole,) = generator.generate([prompt], 8)
    word = word_in(whole)
    training = contract.config.training
    generator._sampler._training = training.model_copy(update={"stop": (word,)})
    (stopped,) = generator.generate([prompt], 8)
    generator._sampler._training = training
    dist.barrier()  # the other rank still samples with weights of this version
    result = {
        "versions": [one.weight_version for one in group],
        "is_close": is_close,
        "is_stopped": are_stopped(whole, stopped, word),
    }
    fresh = folder / f"rank-{rank}.tmp"
    fresh.write_text(json.dumps(result))
    fresh.rename(folder / f"rank-{rank}.json")
    for version in itertools.count(8):
        generator.sync_weights(weights, version)


main(Path(sys.argv[1]))
