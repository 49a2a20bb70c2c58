"""Errors of engines that do not hold the weights that the trainer has. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 8  # number of weights or layers that an error names
MARK = "weights differ: "
"""Begins what an engine's worker finds: an engine on another machine answers with text alone."""


ALTERED = "weights altered: "
"""Begins it instead where another engine, or the same one later, may do better."""


class WeightsDifferError(RuntimeError):
    """An engine's weights, or what it computes with them, differ from the trainer's. Another attempt would, too."""


class WeightsAlteredError(RuntimeError):
    """Bits of weights changed on their way to an engine. Only hardware does it, so another attempt may go well."""


def some(names: Sequence[str]) -> str:
    """Return the first `NAMED` names, and how many more there are."""
    left = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {left} more" if left > 0 else "")
