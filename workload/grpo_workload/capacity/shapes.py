"""Sizes of a model for a plan: numbers of parameters, bytes of a token in the KV cache, activations of a pass.

All from its config.json. Models are made on the meta device once for all plans that have the same model and adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from grpo_spec.contract import Contract
from grpo_spec.trainer import TrainerConfig
from grpo_workload.capacity.meta_pass import Activations, activations, set_checkpointing, training_model
from grpo_workload.capacity.states import BYTES, num_parameters
from grpo_workload.policy.model import tiles
from grpo_workload.policy.model.checkpoint_names import CheckpointNames
from grpo_workload.policy.model.load import empty_model, read_fields
from grpo_workload.weights.export import full

logger = logging.getLogger(__name__)

MOST_TOKENS = 65_536
"""Tokens that a rank is fed of a micro-batch of several sequences: `algorithm.token_budget` chooses no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Sizes of a model and of its adapters."""

    own: int  # parameters of the model without adapters; tied ones count once
    adapted: int | None  # parameters of the adapters
    quantized: int  # of `own`, those in 4 bits
    largest_quantized: int  # of one layer of these
    stacked: int  # of `own`, those that transformers puts together from the checkpoint's: experts
    active: int  # of `own`, those that a token passes
    largest_export: int  # bytes of the weights that a push gathers and converts together, at most
    largest_sent: int  # bytes of the largest tensor that is sent
    layers: int
    hidden: int
    context: int | None  # tokens of the longest sequence that the model knows
    fields: Mapping[str, Any]  # of the text model's configuration, as transformers reads it
    is_quantized: bool  # by config.json: vLLM keeps it in a format of its own

    @property
    def attended(self) -> int:
        """Numbers that attention gets of a token in one layer: of queries, keys and values."""
        heads = self.fields.get("num_attention_heads") or 1
        size = self.fields.get("head_dim") or self.hidden // heads
        return int(size * (heads + 2 * (self.fields.get("num_key_value_heads") or heads)))

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return self.own if self.adapted is None else self.adapted

    def cache_bytes(self, tensor_parallel: int, size: int) -> int:
        """Return bytes of one token in the KV cache of one of `tensor_parallel` GPUs, at `size` bytes a number.

        Layers with a window or with a state in place of a cache are left out.
        """
        text = self.fields
        kinds = text.get("layer_types")
        layers = kinds.count("full_attention") if kinds else self.layers
        if rank := text.get("kv_lora_rank"):  # MLA keeps one latent vector, on every GPU
            return int(layers * (rank + (text.get("qk_rope_head_dim") or 0)) * size)
        heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 1
        width = text.get("head_dim") or self.hidden // (text.get("num_attention_heads") or 1)
        return int(layers * 2 * max(1, heads // tensor_parallel) * width * size)


class Models:
    """The models of several plans, each made once."""

    def __init__(self, *, passes: bool = True) -> None:
        """Without `passes`, activations count as nothing: what does not fit then, cannot fit."""
        self._has_passes = passes
        self._shapes: dict[str, Shapes] = {}
        self._plain: dict[str, Any] = {}  # models as they were made, until they get what training changes
        self._trained: dict[str, Any] = {}
        self._passes: dict[Any, Activations | None] = {}
        self.unknown: str | None = None  # why activations of the last model are not known

    def without_passes(self) -> Models:
        """Return the same models, for plans whose activations count as nothing."""
        bound = Models(passes=False)
        bound._shapes, bound._plain, bound._trained = self._shapes, self._plain, self._trained
        return bound

    def shapes(self, config: TrainerConfig) -> Shapes:
        """Return a model's sizes. ConfigError if transformers cannot make it from its configuration."""
        key = _key(config)
        if key not in self._shapes:
            own = _without_kernels(config)
            self._plain[key] = empty_model(own)
            sizes = _shapes(own, self._plain[key])
            if config.lora is not None:
                trained = (one for one in self._training_model(config).parameters() if one.requires_grad)
                sizes = replace(sizes, adapted=num_parameters(trained))
            self._shapes[key] = sizes
        return self._shapes[key]

    def _training_model(self, config: TrainerConfig) -> Any:
        key = _key(config)
        if key not in self._trained:
            self._trained[key] = training_model(_without_kernels(config), self._plain.pop(key, None))
        return set_checkpointing(self._trained[key], config)

    def activations(self, contract: Contract, tokens: int, *, by_line: bool = False) -> Activations | None:
        """Return what a pass over a micro-batch of `tokens` takes; None if the model does not run on the meta device.

        Args:
            contract: the job.
            tokens: between `longest` and `most_tokens`.
            by_line: take it from the line through the passes over these two, or over one of them and an MLP's tile.
                Memory grows with tokens as the largest of several lines, which are others where MLPs have tiles, so
                between two such passes it is at most what their line says.
        """
        config = contract.config
        shapes = self.shapes(config)
        shortest, most = longest(contract, shapes), most_tokens(contract, shapes)
        tile = config.parallelism.sequence * tiles.TILE
        inner = (tile, tile + 1) if config.parallelism.gradient_checkpointing else ()
        ends = [shortest, *(one for one in inner if shortest < one < most), most]
        if not by_line or tokens in ends:
            return self._pass(config, tokens, shortest, is_first=holds_step(contract, shapes, tokens))
        start, end = next(pair for pair in pairwise(ends) if tokens < pair[1])
        low = self._pass(config, start, shortest, is_first=False)
        high = self._pass(config, end, shortest, is_first=holds_step(contract, shapes, end))
        if low is None or high is None:
            return None
        part, high = (tokens - start) / (end - start), high._replace(gradients=0)
        return Activations(*(int(a + part * (b - a)) for a, b in zip(low, high, strict=True)))

    def _pass(self, config: TrainerConfig, tokens: int, length: int, *, is_first: bool) -> Activations | None:
        if not self._has_passes:
            return None
        parallelism, training = config.parallelism, config.training
        # A rank's part of the tokens, or in attention its part of the heads.
        tokens, length = (max(2, -(-one // parallelism.sequence)) for one in (tokens, length))
        shape: tuple[bool, ...] = (
            parallelism.gradient_checkpointing,
            parallelism.offload_activations,
            parallelism.zero_stage < 2,
        )
        shape += (parallelism.coalesce_grad_reduction, training.kl_coef > 0, training.entropy_coef > 0)
        key = (_key(config), shape, tokens, length, is_first)
        if key not in self._passes:
            try:
                own = _without_kernels(config)
                found = activations(self._training_model(config), own, tokens, length, is_first=is_first)
            except Exception as error:  # whatever 68 families and their remote code raise on tensors without values
                self.unknown, self._passes[key] = f"{type(error).__name__}: {error}", None
                logger.info("activations are not planned: %s", self.unknown)
            else:
                # The values of a layer in 4 bits exist while it is computed.
                whole = self.shapes(config).largest_quantized * BYTES[config.model.dtype]
                self._passes[key] = found._replace(others=found.others + whole)
        return self._passes[key]


def longest(contract: Contract, shapes: Shapes) -> int:
    """Return the tokens of the longest sequence that is planned for: prompts count only with generation.maxModelLen."""
    wanted = contract.config.generation.max_model_len or contract.config.training.max_completion_length + 1
    return max(2, min(wanted, shapes.context or wanted))


def _step_sequences(contract: Contract) -> int:
    """Return the sequences that a rank, or ranks that share them, train on in a step."""
    training = contract.config.training
    return -(-training.prompts_per_step * training.num_generations // max(1, contract.sequence_groups))


def most_tokens(contract: Contract, shapes: Shapes) -> int:
    """Return the tokens that one micro-batch has at most; fewer than a rank's step where one does not hold it all."""
    sequences, length = _step_sequences(contract), longest(contract, shapes)
    sequences = min(sequences, contract.config.training.per_device_train_batch_size or sequences)
    return max(length, min(MOST_TOKENS * contract.config.parallelism.sequence, sequences * length))


def holds_step(contract: Contract, shapes: Shapes, tokens: int) -> bool:
    """Whether a micro-batch of `tokens` is a rank's whole step, were each sequence the longest: none comes before."""
    return tokens >= _step_sequences(contract) * longest(contract, shapes)


def planned_tokens(contract: Contract, shapes: Shapes) -> int:
    """Return the tokens of the micro-batch that has to fit: what the job sets, else one sequence of the longest."""
    length = longest(contract, shapes)
    wanted = contract.config.training.max_tokens_per_micro_batch or length
    return max(length, min(wanted, most_tokens(contract, shapes)))


def _key(config: TrainerConfig) -> str:
    return config.model.model_dump_json() + (config.lora.model_dump_json() if config.lora else "")


def _without_kernels(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with an attention that needs no GPU, and takes as much memory."""
    if not str(config.model.attention).startswith("flash"):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"attention": "varlen"})})


_FIELDS = (
    *("num_hidden_layers", "hidden_size", "max_position_embeddings", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Read as attributes: some families have other names for them, or compute them."""


def _shapes(config: TrainerConfig, plain: Any) -> Shapes:
    known = plain.config.get_text_config()
    text = known.to_dict() | {name: getattr(known, name, None) for name in _FIELDS}
    quantized: list[int] = []
    if config.lora is not None and config.lora.load_in_4bit:
        from grpo_workload.policy.adapters.four_bit import layers  # late: see `environment.show`

        quantized = [layer.weight.numel() for layer in layers(plain, config.lora).values()]
    groups = CheckpointNames(plain).group(full(plain))
    stacked = sum(group.num_bytes for group in groups if len(group.specs) > 1) // BYTES[config.model.dtype]
    used = text.get("num_experts_per_tok") or 1
    experts = next(
        (text[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(name)), 1
    )
    own = num_parameters(plain.parameters())
    return Shapes(
        own=own,
        adapted=None,
        quantized=sum(quantized),
        largest_quantized=max(quantized, default=0),
        stacked=stacked,
        active=own - int(stacked * (1 - used / experts)),
        largest_export=max(group.num_bytes * (1 if group.convert is None else 2) for group in groups),
        largest_sent=max(spec.num_bytes for group in groups for spec in group.specs),
        layers=text.get("num_hidden_layers") or 1,
        hidden=text.get("hidden_size") or 1,
        context=text.get("max_position_embeddings"),
        fields=text,
        is_quantized="quantization_config" in read_fields(config),
    )
