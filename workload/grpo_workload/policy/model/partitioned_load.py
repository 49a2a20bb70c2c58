"""Loads a checkpoint into a model that ZeRO-3 keeps in parts: layer by layer, and read by rank 0 alone.

transformers (up to 5.20) reads it on every rank and makes all of its conversions first, such as experts that are joined
into one tensor: then each rank holds a whole mixture of experts in host memory, although only rank 0 uses it. Here its
own code loads one layer at a time, and other ranks have shapes in place of values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import modeling_utils

logger = logging.getLogger(__name__)

_NAME = "_load_state_dict_into_zero3_model"
_LAYER = re.compile(r"(.*?\.\d+)\.")  # in a weight's name


@contextmanager
def loads_by_layer() -> Iterator[None]:
    """Within it, transformers' `from_pretrained` loads like this under ZeRO-3; no effect under other stages."""
    plain = getattr(modeling_utils, _NAME, None)
    if plain is None:
        logger.warning("transformers %s loads a model on every rank: it has no %s", transformers.__version__, _NAME)
        yield
        return

    def load(model: Any, state_dict: dict[str, Tensor], load_config: Any = None) -> tuple[list[str], set[str]]:
        errors: list[str] = []
        missing = set(model.state_dict())
        for part in _layers(state_dict):
            values = part if dist.get_rank() == 0 else _without_values(model, part)
            more, lacking = plain(model, values, load_config)
            errors += more
            missing &= lacking
        return errors, missing

    setattr(modeling_utils, _NAME, load)
    try:
        yield
    finally:
        setattr(modeling_utils, _NAME, plain)


def _layers(state_dict: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of each layer, and those of none, in an order that is the same on all ranks."""

    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found[1] if found else ""

    for _, names in groupby(sorted(state_dict, key=lambda name: (layer(name), name)), layer):
        yield {name: state_dict[name] for name in names}


def _without_values(model: Any, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as shapes. Not those that may be buffers, which each rank has whole, and loads itself."""
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    return {
        name: tensor
        if tensor.dim() < 2 or name.rpartition(".")[2] in buffers
        else torch.empty_like(tensor, device="meta")
        for name, tensor in part.items()
    }
