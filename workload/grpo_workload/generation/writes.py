"""Proves at every push that vLLM's parameters hold what the trainer has sent, by digests. Runs inside vLLM's workers.

Each weight's digest must be the sender's, and each part of a parameter must hold what a loader has copied there. Layers
may change their weights' form after that. The first push learns of each parameter whether bits and order are kept, and
what agreed once must agree always.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_workload.generation.arrivals import Arrivals
from grpo_workload.generation.copies import Copied, Copies, Copy, Recipe, held, recipe_of
from grpo_workload.weights.differ import MARK, WeightsDifferError, some
from grpo_workload.weights.digest import digest

logger = logging.getLogger(__name__)


class Kind(Enum):
    """The way in which a parameter keeps what was copied into it."""

    EXACT = "as it is"
    ORDER = "in another order"
    GIVEN = "in another form"  # compared before vLLM changes it
    MADE = "computed"


@dataclass(slots=True)
class _Learnt:
    """Findings about a model from its pushes."""

    # Of its parameters, also whether what is copied into them is just what was sent.
    kinds: dict[str, tuple[Kind, bool]] = field(default_factory=dict)
    followed: Recipe | None = None  # of the last push that was followed
    recipe: Recipe | None = None  # that two such pushes had, one after the other: later ones are not followed


_LEARNT: WeakKeyDictionary[nn.Module, _Learnt] = WeakKeyDictionary()


class Writes:
    """One push to `model`. It is entered wherever vLLM changes the weights."""

    def __init__(self, model: nn.Module, *, is_quantized: bool) -> None:
        self._model, self._is_quantized = model, is_quantized
        self._learnt = _LEARNT.setdefault(model, _Learnt())
        self._kinds = self._learnt.kinds
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        self._arrivals = Arrivals(device)
        self._copied: Copied = {}
        self._missing: set[str] = set()  # weights that earlier pushes had
        self._given: dict[str, list[int] | None] = {}
        self._methods: list[Any] = []

    def __enter__(self) -> Writes:
        """See what layers hold just before vLLM changes its form."""
        methods = {id(method): method for layer in self._model.modules() if (method := _method_of(layer)) is not None}
        self._methods = list(methods.values())
        paths = {id(layer): path for path, layer in self._model.named_modules()}

        def look_and_process(process: Callable[..., Any], layer: nn.Module, *args: Any) -> Any:
            self._look(paths[id(layer)], layer)
            return process(layer, *args)

        for method in self._methods:
            method.process_weights_after_loading = partial(look_and_process, method.process_weights_after_loading)
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave vLLM's methods as they were."""
        for method in self._methods:
            del method.process_weights_after_loading  # of the instance; the class keeps its own
        self._methods = []

    def load(self, load_weights: Callable[[Any], Any], weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Call the model's `load_weights` with what arrives (`with_sums`); return what it returns.

        Its copies are followed, which takes as long as a push. Once two pushes have had the same, it is enough that
        parameters hold what these would copy.
        """
        if (recipe := self._learnt.recipe) is not None:
            self._missing = set(recipe)
            taken = self._arrivals.received(weights, partial(self._expect, recipe))
            loaded = load_weights(taken)
        else:
            copies = Copies(self._model, self._arrivals.take, self._needs_sums)
            self._copied = copies.copied
            taken = self._arrivals.received(weights, copies.arrived)
            with copies:
                loaded = load_weights(taken)
        for _ in taken:  # a model may ignore the last weights
            pass
        return loaded

    def _expect(self, recipe: Recipe, name: str, tensor: Tensor, at: int) -> None:
        """Note what parameters will hold of a weight that arrives, whose digest is at `at`."""
        self._missing.discard(name)
        for owner, place, source, dtype in recipe.get(name, ()):
            part, sums = source.of(tensor), self._needs_sums(owner)
            copy = None
            if part is not None and part.dtype == dtype:
                is_taken = source.part is None and not sums
                copy = Copy(at if is_taken else self._arrivals.take(part, sums=sums), dtype, True, source)
            self._copied.setdefault(owner, {})[place] = copy

    def check_arrived(self) -> None:
        """See `Arrivals.check`."""
        self._arrivals.check()

    def check_kept(self) -> None:
        """Check that parameters hold what came, once vLLM has changed their form.

        Raises:
            WeightsDifferError: names parameters that do not hold what they got, or weights that earlier pushes had.
        """
        if self._missing:
            raise WeightsDifferError(f"{MARK}the push has no {some(sorted(self._missing))}, which earlier ones had")
        now, copied = dict(held(self._model)), self._copied
        final = {name: self._in_place(name, now.get(name)) for name in copied if self._is(name, Kind.EXACT, None)}
        whole = {name: self._arrivals.take(now[name], sums=True) for name in copied if self._is(name, Kind.ORDER)}
        digests = self._arrivals.read()
        learnt, wrong = {}, [name for name in self._kinds if name not in copied and name in now]
        for name in copied:
            kind = self._kind(name, now.get(name), final.get(name), whole.get(name), digests)
            is_sent = all(copy is not None and copy.is_sent for copy in copied[name].values())
            if kind is None or (kind, is_sent) != self._kinds.get(name, (kind, is_sent)):
                wrong.append(name)
            elif name not in self._kinds and not (kind is Kind.EXACT and self._is_even(name, now[name])):
                learnt[name] = kind, is_sent
        if wrong:
            raise WeightsDifferError(
                f"{MARK}{some(wrong)} does not hold what vLLM's loaders copied into it. Please report this; another "
                "release of vLLM in spec.image, or other generation.engineArgs, may do without it"
            )
        self._kinds |= learnt
        _list(learnt)
        if self._learnt.recipe is None:
            before, self._learnt.followed = self._learnt.followed, recipe_of(copied)
            self._learnt.recipe = before if before == self._learnt.followed else None

    def _kind(
        self, name: str, one: Tensor | None, final: list[int] | None, whole: int | None, digests: list[list[int]]
    ) -> Kind | None:
        """Return how a parameter keeps what it got; None if it holds something else."""

        def holds(places: list[int] | None) -> bool:
            return places is not None and [digests[at][0] for at in places] == [order for order, *_ in wanted]

        copies, given = [*self._copied[name].values()], self._given.get(name)
        if None in copies:
            return Kind.MADE
        wanted = [digests[copy.digest] for copy in copies if copy is not None]
        unlike = Kind.MADE if self._is_quantized else None
        if given is not None and not holds(given):
            return unlike
        if holds(final):
            return Kind.EXACT
        # Where nothing was written, such as padding, there may be anything.
        is_full = one is not None and one.numel() == sum(math.prod(place.shape) for place in self._copied[name])
        if one is not None and one.numel() and is_full and self._is(name, Kind.ORDER, None):
            total = digest(one, sums=True).tolist() if whole is None else digests[whole]
            if total[1:] == [_wrapped(sum(one[number] for one in wanted)) for number in (1, 2)]:
                return Kind.ORDER
        if given is not None and self._is(name, Kind.GIVEN, None):
            return Kind.GIVEN
        is_processed = name in self._given  # else it has to hold what it got
        return Kind.MADE if self._is(name, None) and (is_processed or final is None) else unlike

    def _is(self, name: str, *kinds: Kind | None) -> bool:
        return self._kinds.get(name, (None, True))[0] in kinds

    def _look(self, path: str, layer: nn.Module) -> None:
        """Take digests of what a layer got, unless they will be taken of what it keeps."""
        for own, one in layer._parameters.items():
            name = f"{path}.{own}".removeprefix(".")
            if one is not None and name in self._copied and not self._is(name, Kind.EXACT):
                self._given[name] = self._in_place(name, one)

    def _in_place(self, name: str, one: Tensor | None) -> list[int] | None:
        """Take the digests of a parameter's parts; None if it has them no more."""
        parts = []
        for place, copy in self._copied[name].items():
            part = None if one is None or copy is None or copy.dtype != one.dtype else place.of(one)
            if part is None:
                return None
            parts.append(part)
        return [self._arrivals.take(part, sums=False) for part in parts]

    def _needs_sums(self, name: str) -> bool:
        return self._is(name, Kind.ORDER, None)

    def _is_even(self, name: str, one: Tensor) -> bool:
        """Return whether another order would look the same: nothing is learnt from a bias of zeros."""
        return name in self._given and bool((one == one.flatten()[0]).all())


def _list(learnt: dict[str, tuple[Kind, bool]]) -> None:
    """Name what is not kept as it was sent, once; parameters of all layers together."""
    groups: dict[Kind, list[str]] = {}
    for name, (kind, is_sent) in learnt.items():
        groups.setdefault(kind if is_sent else Kind.MADE, []).append(re.sub(r"\.\d+\.", ".*.", name))
    for kind, names in groups.items():
        if kind is not Kind.EXACT:
            logger.warning("vLLM keeps these weights %s: %s", kind.value, ", ".join(dict.fromkeys(names)))


def _method_of(layer: nn.Module) -> Any:
    method = getattr(layer, "quant_method", None)
    return method if hasattr(method, "process_weights_after_loading") else None


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
