"""The names, shapes and layout that weights have in checkpoints, where these differ from those in the loaded model.

transformers changes weights as it loads them: it renames them, stacks experts, splits or joins projections. Engines
read checkpoints, so what they get is changed back by transformers itself, as `save_pretrained` does. That converts the
whole model at once; here each weight is converted with the few that it depends on, as soon as these are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.core_model_loading import revert_weight_conversion

from grpo_spec.errors import ConfigError
from grpo_workload.weights.export import Weight, WeightGroup
from grpo_workload.weights.wire import TensorSpec

Plan = list[tuple[tuple[str, ...], tuple[TensorSpec, ...], bool]]
"""For each group: the model's names, what they become, and whether that takes more than new names."""


class CheckpointNames:
    """Groups a model's weights by the checkpoint's weights that they become. Remembers how, for the next push."""

    def __init__(self, model: Any) -> None:
        """Take the model as transformers loaded it; adapters may be put into it."""
        self._model = model
        self._planned: tuple[list[TensorSpec], Plan] | None = None

    def group(self, weights: Sequence[Weight]) -> list[WeightGroup]:
        """Return `weights`, which have the model's names, as groups that give the checkpoint's.

        Raises:
            ConfigError: transformers cannot convert this model's weights back.
        """
        specs = [weight.spec for weight in weights]
        if self._planned is None or self._planned[0] != specs:
            self._planned = specs, _plan(self._model, specs)
        by_name = {weight.name: weight for weight in weights}
        return [
            WeightGroup(
                tuple(by_name[name] for name in names), given, self._converter(names, given) if converts else None
            )
            for names, given, converts in self._planned[1]
        ]

    def _converter(self, names: Sequence[str], given: Sequence[TensorSpec]) -> Callable[..., list[Tensor]]:
        def convert(*values: Tensor) -> list[Tensor]:
            made = revert_weight_conversion(self._model, dict(zip(names, values, strict=True)))
            return [made[spec.name] for spec in given]

        return convert


def save_config(model: Any, folder: Path) -> None:
    """Write what `from_pretrained` needs beside the weights: the configurations of `model`.

    Unlike `save_pretrained` this does not look at the model's parameters, which ZeRO-3 would gather for that.
    """
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


class _Traced(Tensor):
    """A tensor without values that knows the names of the weights it was computed from."""

    sources: frozenset[str]

    @classmethod
    def of(cls, spec: TensorSpec) -> _Traced:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta").as_subclass(cls)
        tensor.sources = frozenset({spec.name})
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        sources = _union(leaf.sources for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Traced))
        for leaf in tree_leaves(result):
            if isinstance(leaf, _Traced):
                leaf.sources = sources
        return result


def _plan(model: Any, specs: Sequence[TensorSpec]) -> Plan:
    traced = {spec.name: _Traced.of(spec) for spec in specs}
    by_sources: dict[frozenset[str], list[tuple[str, _Traced]]] = {}
    for name, tensor in revert_weight_conversion(model, dict(traced)).items():
        by_sources.setdefault(tensor.sources, []).append((name, tensor))
    if missing := sorted(traced.keys() - _union(by_sources)):
        raise ConfigError(f"model: transformers does not say what {', '.join(missing)} are called in checkpoints")
    plan: Plan = []
    for sources, given in by_sources.items():
        names = tuple(name for name in traced if name in sources)  # in the model's order
        renamed = len(names) == len(given) == 1 and given[0][1] is traced[names[0]]
        if not renamed:
            _check_separable(model, {name: traced[name] for name in names}, given)
        plan.append((names, tuple(_spec(name, tensor) for name, tensor in given), not renamed))
    order = {name: place for place, name in enumerate(traced)}
    return sorted(plan, key=lambda group: order[group[0][0]])


def _check_separable(model: Any, sources: dict[str, _Traced], given: Sequence[tuple[str, _Traced]]) -> None:
    made = revert_weight_conversion(model, dict(sources))
    if {name: tensor.shape for name, tensor in made.items()} != {name: tensor.shape for name, tensor in given}:
        raise ConfigError(
            f"model: {', '.join(sources)} cannot be converted to the checkpoint's {', '.join(dict(given))} without "
            "the rest of the model; use another"
        )


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return reduce(frozenset.union, sets, frozenset())
