"""Loads a checkpoint that rank 0 alone reads, one weight at a time; the other ranks get each from it, on their device.

transformers reads it on every rank, and converts ahead, such as experts that are joined into one tensor: then each rank
holds a whole model in host memory. Here transformers' own code still names, converts and places weights, but one after
the other, and with shapes in place of values where they are not read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import core_model_loading, modeling_utils

from grpo_workload.policy.model.replacing import replaced

logger = logging.getLogger(__name__)

_PARTITIONED, _WHOLE, _SET = (
    "_load_state_dict_into_zero3_model",
    "convert_and_load_state_dict_in_model",
    "set_param_for_module",
)
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' variable: threads would convert weights ahead


@contextmanager
def one_rank_reads(device: torch.device, later: Callable[[Any], Collection[str]]) -> Iterator[None]:
    """Within it, transformers' `from_pretrained` loads like this, and is collective.

    Args:
        device: where the weights go, and where ranks exchange them. Buffers that no checkpoint has are elsewhere.
        later: says which weights of the model, without values yet, stay in rank 0's host memory, for `shared`: files
            of their type are only mapped there. Other ranks have shapes. Not under ZeRO-3.
    """
    plain, put = getattr(modeling_utils, _WHOLE, None), getattr(core_model_loading, _SET, None)
    if plain is None or put is None or not hasattr(modeling_utils, _PARTITIONED):
        logger.warning("transformers %s loads a model on every rank: it has other functions", transformers.__version__)
        yield
        return
    kept: set[str] = set()

    def load(model: Any, state_dict: Mapping[str, Any], load_config: Any, **rest: Any) -> Any:
        kept.update(later(model))
        if _reads():
            return plain(model=model, state_dict=state_dict, load_config=load_config, **rest)
        shapes = {name: _without_values(tensor) for name, tensor in state_dict.items()}
        nowhere = replace(load_config, device_map={"": torch.device("meta")})
        return plain(model=model, state_dict=shapes, load_config=nowhere, **rest)

    def load_partitioned(model: Any, state_dict: Mapping[str, Any], load_config: Any) -> tuple[list[str], set[str]]:
        info, _ = load(model, state_dict, load_config)
        errors = [f"{name}: {error}" for name, error in info.conversion_errors.items()]
        errors += [f"size mismatch for {name}: {found}, not {own}" for name, found, own in info.mismatched_keys]
        return info.error_msgs + errors, info.missing_keys

    def fill(model: Any, name: str, value: Tensor, info: Any, *rest: Any) -> None:
        owner, _, attribute = name.rpartition(".")
        held: Any = getattr(model.get_submodule(owner), attribute, None)
        if hasattr(held, "ds_id"):
            info.missing_keys.discard(name)
            if value.shape == held.ds_shape:
                _fill_parts(held, value)
            else:
                info.mismatched_keys.add((name, value.shape, held.ds_shape))
        else:
            put(model, name, value if name in kept else shared(value, device), info, *rest)

    functions = (
        (modeling_utils, _PARTITIONED, load_partitioned),
        (modeling_utils, _WHOLE, load),
        (core_model_loading, _SET, fill),
    )
    with replaced(*functions), _set_variable(_ONE_BY_ONE, "1"):
        yield


def shared(value: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's `value` on `device` of each rank; of others only the shape and the type count. Collective."""
    if not _is_distributed():
        return value.to(device)
    value = value.to(device).contiguous() if _reads() else torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.broadcast(value.view(-1).view(torch.uint8), 0)  # bytes: not every backend knows every type
    return value


def _fill_parts(held: Any, value: Tensor) -> None:
    """Set a parameter that ZeRO-3 keeps in parts to rank 0's `value`."""
    import deepspeed  # late: `grpo plan` imports this file, and has no DeepSpeed

    held._is_hf_initialized = True  # else transformers would draw random values for it
    with deepspeed.zero.GatheredParameters([held], modifier_rank=0), torch.no_grad():
        if _reads():
            held.copy_(value)


def _without_values(tensor: Any) -> Tensor:
    """Return a tensor, or a part of a file that is to become one, as its shape and type."""
    if isinstance(tensor, Tensor):
        return torch.empty_like(tensor, device="meta")
    shape = tensor.get_shape()
    dtype = (tensor[:0] if shape else tensor[...]).dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def _is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _reads() -> bool:
    return not _is_distributed() or dist.get_rank() == 0


@contextmanager
def _set_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
