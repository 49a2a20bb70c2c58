"""Counts storages that live, and replaces what tensors of the meta device lack by something of the same sizes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_workload.policy.logprobs import logprobs
from grpo_workload.policy.model import attention, tiles
from grpo_workload.policy.model.replacing import replaced

ROUNDING = 512
"""CUDA's allocator gives a tensor the next multiple of so many bytes."""
LIGER = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose rotary embeddings and SwiGLU are Liger's on GPUs, and stand-ins here; others are computed unfused."""


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that live, by `tag` at their creation, and keeps those of the highest total."""

    def __init__(self, rounding: int = ROUNDING) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.tag = "others"
        self._rounding, self._known = rounding, dict[int, tuple[int, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.masked_scatter_backward.default and args[0].is_meta:  # its shape depends on data
            out = args[0].new_empty(args[2])
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        if func is torch.ops.torch_attn._varlen_attn_backward.default:
            self._note(_scratch(*args[1:3]))
        return out

    def count(self, tensor: Tensor, tag: str | None = None) -> None:
        """Count the storage of a tensor; one that is known gets the `tag`, if there is one."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._known:
            if tag is not None:
                size, former = self._known[key]
                self._known[key] = size, tag
                self.now.update({tag: size, former: -size})
            return
        size, tag = -(-storage.nbytes() // self._rounding) * self._rounding, tag or self.tag
        self._known[key] = size, tag
        self.now[tag] += size
        self._note(0)
        weakref.finalize(storage, self._drop, key)

    def _note(self, beside: int) -> None:
        """Note the total as a peak if it is one, with `beside` bytes that only a kernel knows."""
        if self.now.total() + beside > self.peak.total():
            self.peak = self.now + Counter({self.tag: beside})

    def _drop(self, key: int) -> None:
        size, tag = self._known.pop(key)
        self.now[tag] -= size


def _scratch(query_NHD: Tensor, key_MGD: Tensor) -> int:
    """Bytes that FlashAttention 2 takes beside the gradients in its backward pass: that of the queries in float32, and
    those of keys and values for each query head.
    """
    sums = 4 * query_NHD.numel()
    heads, shared = query_NHD.size(1), key_MGD.size(1)
    copies = 2 * key_MGD.nbytes * heads // shared if heads != shared else 0
    return sums + copies


@contextmanager
def like_a_gpu(model: Any, *, liger: bool, live: Live) -> Iterator[None]:
    """Within it, meta tensors take a GPU's paths through the code. Kernels that allocate nothing do nothing."""
    plain_norm, cast, slices = torch.nn.functional.rms_norm, torch.autocast, logprobs._slices

    def norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
        return _Norm.apply(x, weight) if x.is_meta and weight is not None else plain_norm(x, shape, weight, eps)  # type: ignore[no-untyped-call]

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else cast(device_type, *args, **kwargs)

    def tagged(*args: Any) -> Iterator[Any]:
        live.tag = "logits"
        try:
            yield from slices(*args)
        finally:
            live.tag = "others"

    def nothing(*args: Any) -> None:
        return

    places: list[tuple[Any, str, Any]] = [
        (attention, "_has_kernel", lambda query: True),
        (logprobs, "_passes", lambda tensor: (nothing, nothing)),  # Triton's kernels work in place
        (logprobs, "_add_product", nothing),  # cuBLAS adds to the sum
        (logprobs, "_slices", tagged),
        (torch, "autocast", autocast),
        (transformers.masking_utils, "is_tracing", lambda *args: True),  # otherwise it reads positions' values
        (torch.nn.functional, "rms_norm", norm),
    ]
    if liger and model.config.model_type in LIGER:
        places += _liger(model)
    with replaced(*places):
        yield


def _liger(model: nn.Module) -> list[tuple[Any, str, Any]]:
    kind = next(type(module).__module__ for module in model.modules() if hasattr(module, "rotary_emb"))
    module = __import__(kind, fromlist=["apply_rotary_pos_emb"])
    found: list[tuple[Any, str, Any]] = [(module, "apply_rotary_pos_emb", _rotate)]
    for layer in model.modules():
        if all(hasattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj")):
            found.append((layer, tiles.UNTILED if hasattr(layer, tiles.UNTILED) else "forward", _swiglu_of(layer)))
    return found


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    return _Rope.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]


def _swiglu_of(layer: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: layer.down_proj(_Swiglu.apply(layer.gate_proj(x), layer.up_proj(x)))  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    """PyTorch's fused RMSNorm keeps its input and one number a row; on meta it would be decomposed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _Swiglu(torch.autograd.Function):
    """Liger's keeps both factors, and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return gate.detach(), up.detach()


class _Rope(torch.autograd.Function):
    """Liger's rotates in place."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return query.detach(), key.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (*gradients, None, None)
