"""Help for vLLM's layerwise reload with models that do not load all weights as it expects.

That reload puts empty tensors in place of a layer's, wraps their loaders, and fills the layer's own tensors once all
loaders have run (`vllm/model_executor/model_loader/reload`, read in 0.32 and 0.33). Called inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

WRITTEN_PAST = {"gpt_oss": ("sinks", "w13_weight")}
"""By family: a layer with one of these parameters gets its weights without their loaders."""


def name_loaders(model: nn.Module) -> None:
    """Give loaders without a name one, which the reload asks for: those of MiniMax-M2's norms are partial functions."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def written_past(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield those layers of vLLM's `model`, by name, that it writes to without their loaders."""
    marks = WRITTEN_PAST.get(model.config.model_type, ())
    for path, layer in model.named_modules() if marks else ():
        if any(name in layer._parameters for name in marks):
            yield path, layer


def spare(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Take the layers of `written_past` out of a reload that has begun: they keep their own tensors.

    Returns:
        The weights to load, as copies where vLLM may write to them (on all ranks of tensor parallelism but the first,
        to the biases of experts).

    Raises:
        NotImplementedError: a layer keeps its weights in another form than checkpoints.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    layers = list(written_past(model))
    for path, layer in layers:
        info = get_layerwise_info(layer)
        assert info.kernel_tensors is not None, "the reload has begun"
        own, _ = info.kernel_tensors
        for name, empty in layer.named_parameters(recurse=False):
            if (own[name].shape, own[name].dtype) != (empty.shape, empty.dtype):
                raise NotImplementedError(f"{path}.{name} is not kept as checkpoints have it")
        _place_kernel_tensors(layer, info)
        info.reset()
    return ((name, tensor.clone()) for name, tensor in weights) if layers else weights
