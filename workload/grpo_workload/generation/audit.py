"""Checks inside a vLLM worker that a push has reached every parameter of its model.

vLLM ignores weights whose names it does not know, and at most warns of parameters that get none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_spec.inputs import VISION_FAMILIES
from grpo_workload.generation.derived import Push
from grpo_workload.generation.reload import name_loaders, spare, written_past
from grpo_workload.generation.writes import Writes
from grpo_workload.weights.differ import MARK, WeightsDifferError, some

TOLERANCE = 1e-2
"""Largest relative difference of a parameter that was replaced by itself: more than rounding."""

Rows = Mapping[str, Tensor]
"""Norm of each row of each parameter, by name."""


@torch.no_grad()
def rows_of(model: nn.Module) -> Rows:
    """Return the norms of all rows: a copy would take the model's memory once more, and sums miss a wrong order."""
    return {
        name: torch.linalg.vector_norm(parameter, dim=-1, dtype=torch.float32)
        for name, parameter in model.named_parameters()
        if parameter.layout == torch.strided and parameter.is_floating_point() and parameter.ndim > 0
    }


def check_same(model: nn.Module, before: Rows) -> None:
    """Check that parameters have the values of `before`: those of the checkpoint were pushed.

    Raises:
        WeightsDifferError: names the parameters that differ most.
    """
    after = rows_of(model) if before else {}  # there are no norms of 8-bit numbers
    changes = {name: _change(after.get(name), rows) for name, rows in before.items()}
    wrong = sorted((name for name in changes if not changes[name] <= TOLERANCE), key=lambda name: -changes[name])
    if wrong:
        raise WeightsDifferError(
            f"{MARK}the engine got the same weights that it had loaded, and then had others in "
            + some([f"{name} (by {changes[name]:.0%})" for name in wrong])
        )


def _change(after: Tensor | None, before: Tensor) -> float:
    if after is None or after.shape != before.shape:
        return math.inf
    change = float(torch.linalg.vector_norm(after - before)) / (float(torch.linalg.vector_norm(before)) or 1.0)
    return math.inf if math.isnan(change) else change


def check_fed(model: nn.Module, loaded: Collection[str] | None) -> None:
    """Check that every parameter has got all of its values. Called when vLLM has loaded them, before it processes them.

    Args:
        model: vLLM's, between `initialize_layerwise_reload` and `finalize_layerwise_reload`.
        loaded: names that its `load_weights` returned.

    Raises:
        WeightsDifferError: names the layers that lack weights.
    """
    if missing := sorted(_missing(model, loaded)):
        raise WeightsDifferError(f"{MARK}the push has no weights, or too few, for {some(missing)}")


def _missing(model: Any, loaded: Collection[str] | None) -> Iterator[str]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    uncounted: set[int] = set()
    named: dict[int, list[str]] = {}
    for path, layer in written_past(model):
        for name, _ in layer.named_parameters(path, recurse=False):
            if loaded is not None and name not in loaded:
                yield name
    towers = _towers(model)
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    for path, layer in model.named_modules():
        if path.partition(".")[0] in towers:
            continue
        parameters = {name: one for name, one in layer._parameters.items() if one is not None}
        for name, one in parameters.items():
            named.setdefault(id(one), []).append(f"{path}.{name}")
            if name in SKIP_LOAD_TENSORS:  # vLLM does not count what is loaded into these
                uncounted.add(id(one))
        info = get_layerwise_info(layer)
        if not info.can_load() or hasattr(layer, "kv_cache_dtype"):  # complete; attention has only scales
            continue
        if is_tied and isinstance(layer, ParallelLMHead):
            continue
        expected = sum(_num_values(layer, one) for name, one in parameters.items() if name not in SKIP_LOAD_TENSORS)
        if info.load_numel < expected:
            yield f"{path} ({info.load_numel} of {expected} numbers)"
    for names in (named[one] for one in uncounted):  # all modules that share a parameter name it
        if loaded is not None and names[-1].endswith("bias") and not any(name in loaded for name in names):
            yield names[-1]


def _towers(model: Any) -> Collection[str]:
    # The trainer has no weights for the tower of a model whose text part it trains; an engine may have built it.
    return () if model.config.model_type in VISION_FAMILIES else getattr(model, "_tower_model_names", ())


def _num_values(layer: Any, parameter: Tensor) -> int:
    """Return how many numbers of a checkpoint a parameter takes: vLLM pads some, among them rows of the vocabulary."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(layer, VocabParallelEmbedding):
        return int(layer.shard_indices.num_org_elements * math.prod(parameter.shape[1:]))
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def check_derived(model: Any, push: Push) -> None:
    """Check that the push has made again whatever vLLM had made of the weights before.

    Raises:
        WeightsDifferError: names the tensors that are as they were.
    """
    if stale := push.finish(_towers(model)):
        raise WeightsDifferError(
            f"{MARK}a push leaves {some(stale)} as vLLM made it of the first weights, and the engine would compute "
            "with those. Please report this; another release of vLLM in spec.image, or other generation.engineArgs, "
            "may do without it"
        )


class Audit:
    """One push to vLLM's `model`. It is made before vLLM prepares the layers, and entered wherever it changes them."""

    def __init__(self, model: Any, *, is_quantized: bool) -> None:
        """`is_quantized`: vLLM quantizes the weights as it loads them, and keeps none as checkpoints have them."""
        self._model, self._is_quantized = model, is_quantized
        self._push, self._writes = Push(model), Writes(model, is_quantized=is_quantized)
        name_loaders(model)

    def __enter__(self) -> Audit:
        self._push.__enter__()
        self._writes.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writes.__exit__(*error)
        self._push.__exit__(*error)

    def load(self, load_weights: Callable[[Any], Any], weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Let vLLM load weights that their digests follow; return the names that it has loaded.

        Raises:
            WeightsDifferError: names layers that lack weights.
        """
        loaded = self._writes.load(load_weights, spare(self._model, weights))
        if not self._is_quantized:
            check_fed(self._model, loaded)
        return loaded

    def finish(self, before: Rows) -> None:
        """Check what the engine holds, once vLLM has processed its layers; `before`: rows that may not have changed.

        Raises:
            WeightsDifferError: names weights that are not those that were sent, or tensors of old weights.
        """
        self._writes.check_arrived()
        check_same(self._model, before)
        self._writes.check_kept()
        check_derived(self._model, self._push)


@contextmanager
def audited(model: Any, *, is_initial: bool, is_quantized: bool) -> Iterator[None]:
    """Within it, vLLM replaces all weights of `model`, which digests follow. Checks that it got all of them.

    Args:
        model: vLLM's.
        is_initial: the weights are those that it has loaded already, so that nothing may change.
        is_quantized: see `Audit`.

    Raises:
        WeightsDifferError: names layers that lack weights, or have others than were sent or than before, or tensors
            of old weights.
    """
    audit = Audit(model, is_quantized=is_quantized)
    before = rows_of(model) if is_initial and not is_quantized else {}
    load = model.load_weights
    model.load_weights = lambda weights: audit.load(load, weights)
    try:
        with audit:
            yield
    finally:
        del model.load_weights  # of the instance; the class keeps its own
    audit.finish(before)
