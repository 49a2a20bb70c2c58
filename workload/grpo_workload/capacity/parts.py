"""The parts of each phase on the GPU of a rank or of an engine, and in the host memory of a trainer pod.

`policy.step.policy`, `policy.memory`, `weights`, `generation.colocate`, `generation.servers.weight_sender` and
`storage.checkpoints` do what is added up here; docs/memory.md says where each constant is from.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from grpo_spec.contract import Contract, Engine
from grpo_spec.generation import Topology
from grpo_workload.capacity.shapes import Models, Shapes, holds_step, longest, most_tokens, planned_tokens
from grpo_workload.capacity.states import BYTES, GIB, bucket_bytes, live_bytes, training_footprint
from grpo_workload.generation.cache_rest import sequences_of_engine
from grpo_workload.generation.servers.weight_sender import PIECE_BYTES
from grpo_workload.policy.memory.spare import COMMUNICATOR, SPARE, gather_buckets, reserve
from grpo_workload.storage.model_files import FILE_BYTES

CUDA_CONTEXT = GIB // 2
ENGINE_PROFILE = int(1.3 * GIB)
"""Bytes that vLLM takes beside weights and KV cache, and keeps while it sleeps: graphs and workspaces."""
DOUBT = 0.1
"""Share of a GPU by which a plan may be wrong: a job that lacks no more is never refused."""

LOAD, PUSH, GENERATE, TRAIN, UPDATE, SAVE = PHASES = (
    *("load", "push", "generate"),
    *("forward+backward", "optimizer step", "save"),
)
Parts = dict[str, int]


class EngineSize:
    """Bytes of one vLLM worker."""

    def __init__(
        self,
        contract: Contract,
        shapes: Shapes,
        tensor_parallel: int,
        gpu_bytes: int,
        fixed: int,
        rest: int | None = None,
        spare: int = 0,
    ) -> None:
        """Size a worker.

        Args:
            contract: the job.
            shapes: sizes of its model.
            tensor_parallel: workers that hold one copy of it.
            gpu_bytes: memory of a GPU.
            fixed: bytes of CUDA and NCCL that count towards vLLM's share of the GPU.
            rest: bytes that a worker may take whose share is not set, since it sleeps.
            spare: bytes that are free beside these.
        """
        generation, size = contract.config.generation, BYTES[contract.config.model.dtype]
        # In a format of its own (MXFP4, AWQ), which may be of 4 bits, or as vLLM makes it.
        stored = 0.5 if shapes.is_quantized else 1 if generation.is_quantized else size
        self.weights = math.ceil(stored * shapes.own / tensor_parallel)
        length = generation.max_model_len or shapes.context or longest(contract, shapes)
        coarse = str(generation.python_args.get("kv_cache_dtype", "auto")).startswith("fp8")
        least = shapes.cache_bytes(tensor_parallel, 1 if coarse else size) * length  # vLLM refuses less
        given = generation.kv_cache_bytes
        if given is None:
            share = int(generation.gpu_share * gpu_bytes) - fixed if rest is None else rest
            given = share - self.weights - ENGINE_PROFILE
        if rest is not None and len(set(shapes.fields.get("layer_types") or ())) < 2:
            given = min(given, (sequences_of_engine(contract) + 1) * least)
        short = max(0, least - given)
        self.over = 0 if rest is not None and short > spare else short  # beyond that, the GPU itself lacks them
        self.cache = max(given, least)
        self.per_layer = self.weights // shapes.layers  # loaded beside a layer's own weights (vLLM's layerwise reload)

    @property
    def awake(self) -> Parts:
        """Its parts while it can generate."""
        return {"engine weights": self.weights, "KV cache": self.cache, "engine profile": ENGINE_PROFILE}


class Trainers:
    """The ranks of a job, of which only those that send weights differ."""

    def __init__(self, contract: Contract, gpu_bytes: int, models: Models, shapes: Shapes) -> None:
        self.contract, self.config, self.gpu_bytes = contract, contract.config, gpu_bytes
        self.models, self.shapes, self.world = models, shapes, contract.world_size
        self.need = training_footprint(
            self.config,
            num_parameters=shapes.own,
            world_size=self.world,
            num_adapted=shapes.adapted,
            num_quantized=shapes.quantized,
        )
        generation = self.config.generation
        split, colocated = generation.tensor_parallel, generation.topology is Topology.COLOCATE
        self.engine: EngineSize | None = None
        if colocated and generation.engine == "vLLM":
            fixed, rest, spare = (split > 1) * COMMUNICATOR, None, reserve(gpu_bytes, self._buckets_of_push())
            if generation.takes_rest:
                rest = gpu_bytes - spare - self.need.states - CUDA_CONTEXT - (self.world > 1) * COMMUNICATOR - fixed
            self.engine = EngineSize(contract, shapes, split, gpu_bytes, fixed, rest, spare)

    def phases(self, tokens: int, *, sends: bool, by_line: bool = False) -> dict[str, Parts]:
        """Return the parts of each phase on a rank's GPU, for micro-batches of `tokens`."""
        need, engine, generation = self.need, self.engine, self.config.generation
        links = (
            (self.world > 1)
            + (self.config.parallelism.sequence > 1)
            + (generation.tensor_parallel > 1 if engine else sends)
        )
        always = {"CUDA context": CUDA_CONTEXT, "NCCL": links * COMMUNICATOR} | {
            "weights": need.weights,
            "reference weights": need.reference,
            "kept gradients": need.kept,
        }
        here = need.masters + need.moments - need.away
        states = {"masters": min(need.masters, here), "moments": max(0, here - need.masters)}
        whole = {"masters": need.masters, "moments": need.moments}
        awake = engine.awake if engine else {}
        asleep = self._asleep
        gathers = self._gathers()
        push = {"push buckets": gathers + (self._pieces() if sends and not engine else 0)}
        if engine:
            push |= {"engine weights": engine.weights, "engine reload": engine.per_layer} | asleep
        step = {"gradients": need.gradients, "buckets": self._buckets()}
        return {
            LOAD: always | states | awake,
            PUSH: always | states | push,
            GENERATE: always | states | awake,
            TRAIN: always | states | asleep | self._passes(tokens, by_line=by_line),
            UPDATE: always | whole | asleep | step,
            SAVE: always | states | awake | {"push buckets": gathers},
        }

    def largest(self, tokens: int) -> int:
        """Return the tokens of the largest micro-batch that leaves `SPARE`, at least `tokens`."""
        high = most_tokens(self.contract, self.shapes)
        if self.config.training.max_tokens_per_micro_batch is not None or tokens == high:
            return tokens
        room = (1 - SPARE) * self.gpu_bytes
        if self._training_bytes(high) <= room:
            return high
        sizes = range(tokens, high)
        return sizes[max(0, bisect_right(sizes, room, key=self._training_bytes) - 1)]

    def _training_bytes(self, tokens: int) -> int:
        return sum(self.phases(tokens, sends=True, by_line=True)[TRAIN].values())

    @property
    def _asleep(self) -> Parts:
        """Bytes that a colocated engine keeps while the rank trains."""
        if self.engine is None:
            return {}
        return {"engine profile": ENGINE_PROFILE} if self.config.generation.sleep_level else self.engine.awake

    def host(self, gpus: int, *, is_first: bool) -> dict[str, Parts]:
        """Return the parts of each phase in the host memory of a pod with `gpus` ranks."""
        shapes, size = self.shapes, BYTES[self.config.model.dtype]
        parallelism, level = self.config.parallelism, self.config.generation.sleep_level
        share = math.ceil(shapes.trained / self.world)
        offloaded = 16 * share if parallelism.offload_optimizer == "cpu" else self.need.away
        found = None
        if parallelism.offload_activations:
            found = self.models.activations(self.contract, planned_tokens(self.contract, shapes))
        kept = {"offloaded states": gpus * offloaded}
        if self.engine and level == 1:
            kept["sleeping engine weights"] = gpus * self.engine.weights
        masters = self.need.masters + self.need.moments or 12 * share
        model = size * shapes.trained
        copies = gpus * masters + (gpus * model // self.world if model > FILE_BYTES else is_first * model)
        stacked = is_first * size * shapes.stacked // shapes.layers  # rank 0 alone reads, less than a layer at a time
        if is_first and parallelism.zero_stage < 3:  # DeepSpeed's own copy of the weights
            copies += model
        return {
            LOAD: {"stacked experts": stacked},
            TRAIN: kept | {"offloaded activations": gpus * (found.in_host_memory if found else 0)},
            SAVE: kept | {"checkpoint copies": copies},
        }

    def _passes(self, tokens: int, *, by_line: bool) -> Parts:
        shapes, found = self.shapes, self.models.activations(self.contract, tokens, by_line=by_line)
        live = live_bytes(self.config, num_parameters=shapes.own, world_size=self.world)
        stage = self.config.parallelism.zero_stage
        buckets = self._buckets() if stage else 0  # without ZeRO they exist when the passes have ended
        parts = {"live parameters": live, "buckets": buckets}
        gradients = 0 if holds_step(self.contract, shapes, tokens) else self.need.gradients
        if self.config.parallelism.coalesce_grad_reduction:
            gradients = max(gradients, BYTES[self.config.model.dtype] * shapes.trained)
        if found is not None:
            gradients += found.gradients
            parts |= {"activations": found.others, "logits": found.logits}
            if (ranks := self.config.parallelism.sequence) > 1:  # sent, and got before heads are put side by side
                parts["exchanged heads"] = 2 * BYTES[self.config.model.dtype] * shapes.attended * -(-tokens // ranks)
        return parts | {"gradients": gradients}

    def _buckets(self) -> int:
        return bucket_bytes(self.config, num_trained=self.shapes.trained, world_size=self.world)

    def _buckets_of_push(self) -> int:
        """Bytes that a trainer leaves for `_gathers`, whether or not they are needed."""
        stage = self.config.parallelism.zero_stage
        return gather_buckets(self.shapes.largest_export, is_partitioned=stage == 3)

    def _gathers(self) -> int:
        """Bytes of the two buckets of a push out of ZeRO-3; else of a weight that is made of others, and the next."""
        if self.config.pushes_adapters:
            return 0
        if self.config.parallelism.zero_stage == 3:
            return gather_buckets(self.shapes.largest_export, is_partitioned=True)
        return 2 * self.shapes.largest_export if self.shapes.stacked or self.shapes.adapted else 0

    def _pieces(self) -> int:
        size = BYTES[self.config.model.dtype]
        if self.config.pushes_adapters:
            return min(2 * PIECE_BYTES["nccl"], size * (self.shapes.adapted or 0))
        return 2 * max(PIECE_BYTES["nccl"], self.shapes.largest_sent)


def engine_phases(contract: Contract, engine: Engine, gpu_bytes: int, shapes: Shapes) -> tuple[dict[str, Parts], int]:
    """Return the parts of each phase on a GPU of an engine, and the bytes that its share lacks."""
    own = (engine.copy_size > 1) * COMMUNICATOR  # its other one is the transfer's
    size = EngineSize(contract, shapes, engine.copy_size, gpu_bytes, fixed=CUDA_CONTEXT + own)
    always = {"CUDA context": CUDA_CONTEXT, "NCCL": COMMUNICATOR + own}
    push = {"push buckets": max(PIECE_BYTES["nccl"], shapes.largest_sent), "engine reload": size.per_layer}
    phases = {LOAD: always | size.awake, PUSH: always | size.awake | push, GENERATE: always | size.awake}
    return phases, size.over
