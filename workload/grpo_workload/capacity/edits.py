"""Edits of a job that may make it fit: each is one field and a value. Pure, no torch: the command line uses it.

Their order does not count. What a proposal changes of what is learned (adapters in place of all weights, shorter
completions) is in `CHANGES_RESULT`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_spec.contract import Contract
from grpo_spec.generation import Topology

Edit = tuple[str, Any]
"""A field of the job's spec, by its path, and its new value."""

CHANGES_RESULT = ("lora", "lora.loadIn4Bit", "generation.maxModelLen", "training.maxCompletionLength")
_STATES = ("parallelism.zeroStage", "parallelism.offloadOptimizer", "parallelism.optimizerDtype")


def candidates(contract: Contract) -> Iterator[Edit]:
    """Yield edits of a job; the spec may refuse some of them."""
    config, trainers = contract.config, contract.members
    parallelism, generation, training = config.parallelism, config.generation, config.training
    colocated = generation.topology is Topology.COLOCATE and generation.engine == "vLLM"
    yield from ((_STATES[0], stage) for stage in range(parallelism.zero_stage + 1, 4))
    yield from ((_STATES[1], where) for where in ("generating", "cpu") if parallelism.offload_optimizer != where)
    if parallelism.optimizer_dtype == "float32":
        yield from ((_STATES[2], dtype) for dtype in ("int8", "bfloat16"))
    if not parallelism.gradient_checkpointing:
        yield "parallelism.gradientCheckpointing", True
    elif not parallelism.offload_activations:
        yield "parallelism.offloadActivations", True
    if config.model.attention == "varlen":
        ranks = range(parallelism.sequence + 1, contract.world_size + 1)
        yield from (("parallelism.sequence", size) for size in ranks if contract.world_size % size == 0)
    if (cache := generation.kv_cache_bytes) is not None:
        yield from (("generation.kvCacheMemory", f"{max(1, int(cache * factor) >> 20)}Mi") for factor in _FACTORS)
    elif not generation.takes_rest:
        yield from (("generation.gpuMemoryUtilization", share / 20) for share in range(2, 19))
    if colocated and generation.sleep_level == 0:
        yield "generation.colocate", {"sleepLevel": 2}
    sizes = (2**power for power in range(1, 7))
    yield from (("generation.tensorParallel", size) for size in sizes if size > generation.tensor_parallel)
    if (tokens := training.max_tokens_per_micro_batch) is not None:
        yield from (("training.maxTokensPerMicroBatch", tokens >> power) for power in range(1, 6) if tokens >> power)
    for place, group in enumerate(dict.fromkeys(member.group for member in trainers)):
        pods = sum(member.group == group for member in trainers)
        yield from ((f"trainer.groups[{place}].replicas", pods * factor) for factor in (2, 4, 8))
    if config.lora is None:
        yield "lora", {}
    elif not config.lora.load_in_4bit:
        yield "lora.loadIn4Bit", True
    if (length := generation.max_model_len) is not None:
        halves = (length >> power for power in range(1, 5))
        yield from (("generation.maxModelLen", half) for half in halves if half > training.max_completion_length)
    yield from (("training.maxCompletionLength", training.max_completion_length >> power) for power in (1, 2, 3))


_FACTORS = (4, 2, 0.75, 0.5, 0.25, 0.125)


def keeps_layout(edit: Edit, contract: Contract) -> bool:
    """Whether all ranks and engines stay where they are, so that the contract need not be made again."""
    if edit[0].startswith("trainer."):
        return False
    is_split = edit[0] == "generation.tensorParallel"
    return not is_split or (not contract.engines and all(one.gpus % edit[1] == 0 for one in contract.members))


def edited(spec: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """Return a job's spec, or a part of it with the same field names, with `edit` made."""
    changed: Any = copy.deepcopy(dict(spec))
    *parents, last = re.findall(r"\w+", edit[0])
    place = changed
    for name in parents:
        if isinstance(place, list):
            place = place[int(name)]
        else:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
    place[last] = edit[1]
    return changed  # type: ignore[no-any-return]
