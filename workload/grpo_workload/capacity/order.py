"""An order of plans by tokens a second, from a simple model of a step. It is no forecast: only ratios are of use."""

from __future__ import annotations

from grpo_spec.contract import Contract
from grpo_spec.generation import Topology
from grpo_workload.capacity.plan import Plan
from grpo_workload.capacity.shapes import Shapes, longest
from grpo_workload.capacity.states import BYTES

FLOPS = 4e14  # a second that a GPU reaches in training: 40% of an H100's in bfloat16
HBM = 3.3e12  # bytes a second that it reads of its memory: an H100's
BUS = 5e10  # bytes a second between host memory and GPU: measured on an H100 and an H200 (docs/training.md)
LINK = 1e11  # bytes a second between GPUs that ZeRO-3 gathers with
LAUNCHES = 0.1  # seconds of a micro-batch however small: launches, and waits for other ranks
ALL_REDUCE = 3e-5  # seconds of an all-reduce for one token's activations, two for each layer


def step_seconds(contract: Contract, plan: Plan, shapes: Shapes) -> float:
    """Return the seconds of a step of the model: sampling, then training; at the same time with `maxStaleness`."""
    config, world = contract.config, contract.world_size
    training, parallelism, generation = config.training, config.parallelism, config.generation
    size, length = BYTES[config.model.dtype], longest(contract, shapes)
    samples = training.prompts_per_step * training.num_generations
    # Forward pass 2, gradients of activations 2 and of trained weights 2, forward again with checkpointing 2.
    passes = 4 + (2 if shapes.adapted is None else 0) + 2 * parallelism.gradient_checkpointing + 2 * (training.beta > 0)
    if config.lora is not None and config.lora.load_in_4bit:
        passes += 2  # values of 4 bits are computed again in each pass
    micro_batches = max(1.0, samples * length / contract.sequence_groups / plan.chosen_tokens)
    train = samples * length / world * passes * shapes.active / FLOPS + micro_batches * LAUNCHES
    if parallelism.zero_stage == 3:
        train += micro_batches * 3 * size * shapes.own / LINK
    if parallelism.offload_activations:
        train *= 1.02
    generating = 12 if parallelism.optimizer_dtype == "int8" else 24
    moved = {"none": 0, "generating": generating, "cpu": 40}[parallelism.offload_optimizer]  # bytes; CPU's AdamW
    train += moved * shapes.trained / world / BUS
    workers = world if generation.topology is Topology.COLOCATE else sum(one.world_size for one in contract.engines)
    split = contract.engines[0].copy_size if contract.engines else generation.tensor_parallel
    copies = max(1, workers // split)
    place = next((one for one in plan.gpus if "KV cache" in one.phases["generate"]), None)
    cache = place.phases["generate"]["KV cache"] if place else 0
    token = shapes.cache_bytes(split, size)
    at_once = max(1.0, min(samples / copies, cache / max(1, token * length)))
    rounds = samples / copies / at_once
    read = size * (shapes.own if at_once > 8 else shapes.active) / split + at_once * token * length / 2
    reduced = 2 * shapes.layers * ALL_REDUCE if split > 1 else 0.0
    generate = rounds * training.max_completion_length * (read / HBM + reduced)
    return max(generate, train) if training.max_staleness else generate + train
