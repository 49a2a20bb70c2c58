"""Causal attention over packed sequences for transformers models: no token attends outside its own sequence.

Sequences may share a prompt, whose tokens are then there once: its keys and values are copied for each of them.

Shapes: S sequences, packed end to end into N tokens; H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.shared_prompts import SharedKeys
from grpo_workload.policy.model.attention_blocks import attend_in_blocks
from grpo_workload.policy.model.attention_kernels import Bounds, by_cudnn, copied, one_by_one, takes_cudnn, varlen
from grpo_workload.policy.model.exchange import Exchange

VARLEN = "varlen"
"""Name under which the function is registered: a value of `model.attention`."""

# Values of `layer_types` in a model's configuration. Other layers (linear attention, convolutions) carry a state from
# one sequence into the next, or cut the micro-batch into chunks without regard to its sequences.
_PACKABLE = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
_COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}  # also to means of several keys
_LEAVES_KEYS_OUT = {"chunked_attention", "indexed_attention"} | _COMPRESSED  # of which only the mask tells
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of a call with the bounds of its sequences."""
_BOUNDS = "_grpo_bounds"  # attribute of a layer: those of the call that is computed, also when it is computed again
# Arguments of some models that this function does not support: they change scores, or choose among keys.
_CHANGES_SCORES = ("position_bias", "indices", "block_indices")
_MAX_HEAD_SIZE, _HEAD_SIZE_STEP = 256, 8  # of the kernel


def register() -> None:
    """Register `attn_implementation="varlen"` with transformers."""
    AttentionInterface.register(VARLEN, attend)
    # Packed sequences need no mask. For a name that is not registered here, transformers would drop it silently.
    AttentionMaskInterface.register(VARLEN, lambda *args, **kwargs: None)


def keep_bounds(model: Any) -> None:
    """Give each layer of attention the bounds of sequences in each call: some families (Nemotron) do not pass them.

    And the keys of sequences that share a prompt, and the exchange of a sequence group, which no family passes. No
    other layer gets bounds in models that cannot be packed: these have one sequence at a time (`check_layers`), and
    transformers 5.20 refuses bounds, even of one, without kernels that know them (flash-linear-attention).
    """
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    is_alone = bool(unpackable(model.config))

    def note(_model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = kwargs.pop("shared_keys", None), kwargs.pop("exchange", None)
        for layer in layers:
            vars(layer)[_BOUNDS] = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q"), *own
        return args, {name: value for name, value in kwargs.items() if not (is_alone and name in BOUNDS)}

    model.register_forward_pre_hook(note, with_kwargs=True)


def unpackable(model_config: Any) -> set[str]:
    """Return the types of the model's layers that would mix sequences of one micro-batch."""
    return {*(getattr(model_config.get_text_config(), "layer_types", None) or ())} - _PACKABLE


def check_layers(model_config: Any, implementation: str, *, packs: bool) -> None:
    """Refuse a model with layers that would mix neighbouring sequences, or whose attention `varlen` does not compute.

    Args:
        model_config: transformers' configuration of the model.
        implementation: `model.attention`.
        packs: a micro-batch may hold more than one sequence.

    Raises:
        ConfigError: it names the types of these layers, and the fields that would work.
    """
    types = unpackable(model_config)
    cures = []
    if implementation == VARLEN and types & _LEAVES_KEYS_OUT:
        cures.append("model.attention eager")
    if packs and types:
        cures.append("training.perDeviceTrainBatchSize 1")
    if cures:
        raise ConfigError(
            f"model: {model_config.model_type} has layers of the types {', '.join(sorted(types))}, which "
            f"need {' and '.join(cures)}: others would mix sequences that are packed into one micro-batch, or attend "
            "to tokens that the model does not"
        )


def check_softcap(model_config: Any, implementation: str) -> None:
    """Refuse transformers' sdpa for models that cap their attention scores: it would leave the caps out."""
    softcap = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    if implementation == "sdpa" and softcap is not None:
        raise ConfigError(
            f"model.attention: sdpa ignores the attn_logit_softcapping of {softcap:g} of {model_config.model_type}; "
            "use varlen or eager"
        )


def cached(model: Any) -> str:
    """Return transformers' attention that computes what `varlen` does, with a cache and padding, which it lacks."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and softcap is None else "eager"


def attend(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1GND: Tensor,
    value_1GND: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    shared_keys: SharedKeys | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention [1, N, H, D] of each token to the tokens of its own sequence up to itself.

    Args:
        module: the layer, for error messages.
        query_1HND: queries after rotary embedding.
        key_1GND: keys after rotary embedding.
        value_1GND: values.
        attention_mask: must be None.
        dropout: must be 0.
        scaling: factor of the attention scores; None is 1 / sqrt(D).
        sliding_window: number of last tokens that are attended to, including the token itself; None is all.
        softcap: scores become softcap x tanh(score / softcap); None leaves them.
        s_aux: [H]: attention sinks, the scores of a place without a value that each token attends to; None is none.
        cu_seq_lens_q: int32 [S + 1]: the offset at which each sequence begins, and N.
        max_length_q: tokens of the longest sequence.
        shared_keys: those of each sequence, of which `cu_seq_lens_q` then has the queries; None: each has its own.
        others: further arguments that the model passes to any attention function. With `is_causal=False` transformers'
            sdpa computes the attention, of all tokens to each other.

    Raises:
        ConfigError: the model asks for something unsupported; the message says which attention supports it.
        ValueError: the bounds of sequences are missing.
    """
    if others.get("is_causal") is False:  # within an image, of which a vision tower passes one at a time
        output, _ = sdpa_attention_forward(
            module, query_1HND, key_1GND, value_1GND, attention_mask, dropout=dropout, scaling=scaling, is_causal=False
        )
        return output, None
    known = vars(module).get(_BOUNDS, (None, None, None, None))
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = known[:2]
    shared_keys = shared_keys or known[2]
    exchange: Exchange | None = known[3]
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            "attention over packed sequences was called without cu_seq_lens_q and max_length_q: "
            "sequences would be mixed"
        )
    if attention_mask is not None:
        raise _unsupported(module, "a mask", "use sdpa or eager")
    if dropout:
        raise _unsupported(module, "attention dropout", "use a copy of the model whose config.json sets it to 0")
    if asked := [name for name in _CHANGES_SCORES if others.get(name) is not None]:
        # Not sdpa: transformers' function ignores these arguments. Models that have them may not mask packed sequences
        # in eager.
        raise _unsupported(module, ", ".join(asked), "use eager and training.perDeviceTrainBatchSize 1")
    if sliding_window is None and _has_window(module):
        raise _unsupported(module, "a sliding window that only the mask tells", "use sdpa or eager")
    # Not tensor[0]: its backward pass would fill a tensor with zeros and copy the gradient into it.
    query_NHD, key_NGD, value_NGD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1HND, key_1GND, value_1GND))
    of_queries, num_heads = Bounds(cu_seq_lens_q, max_length_q), query_NHD.size(1)
    if exchange is not None:
        query_NHD, key_NGD, value_NGD = exchange.to_heads(query_NHD, key_NGD, value_NGD)
        s_aux = None if s_aux is None else s_aux[exchange.own_heads(num_heads)]
    output_NHD = _compute(
        query_NHD, key_NGD, value_NGD, of_queries, shared_keys, scaling, sliding_window, softcap, s_aux
    )
    if exchange is not None:
        output_NHD = exchange.to_tokens(output_NHD, num_heads)
    return output_NHD.unsqueeze(0), None


def _compute(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    of_queries: Bounds,
    shared_keys: SharedKeys | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    of_keys = of_queries
    if shared_keys is not None:
        of_keys = Bounds(shared_keys.bounds, shared_keys.longest)
        key_NGD, value_NGD = (copied(tensor, shared_keys.places_M) for tensor in (key_NGD, value_NGD))
    if softcap is not None or sinks_H is not None:
        # Blocks are of sequences with as many queries as keys.
        output_NHD = attend_in_blocks(
            query_NHD if shared_keys is None else copied(query_NHD, shared_keys.places_M),
            key_NGD,
            value_NGD,
            of_keys.starts,
            scale=query_NHD.size(-1) ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
        )
        if shared_keys is not None:
            output_NHD = output_NHD.index_select(0, shared_keys.own_N)
        return output_NHD
    if shared_keys is None and takes_cudnn(query_NHD, key_NGD, value_NGD, of_keys, window):
        return by_cudnn(query_NHD, key_NGD, value_NGD, of_keys, scaling)
    attention = varlen if _has_kernel(query_NHD) else one_by_one
    return attention(query_NHD, key_NGD, value_NGD, of_queries, of_keys, scaling, window)


def _unsupported(module: torch.nn.Module, what: str, cure: str) -> ConfigError:
    return ConfigError(
        f"model.attention: varlen does not support {what}, for which {type(module).__name__} asks; {cure}"
    )


def _has_window(module: torch.nn.Module) -> bool:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    return types is not None and layer is not None and types[layer] == "sliding_attention"


def _has_kernel(query_NHD: Tensor) -> bool:
    if query_NHD.device.type != "cuda" or query_NHD.dtype not in (torch.bfloat16, torch.float16):
        return False
    size = query_NHD.size(-1)
    return (
        size % _HEAD_SIZE_STEP == 0
        and size <= _MAX_HEAD_SIZE
        and torch.cuda.get_device_capability(query_NHD.device) >= (8, 0)
    )
