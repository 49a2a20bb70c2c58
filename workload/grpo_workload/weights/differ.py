"""What is raised when an engine does not hold the weights that the trainer has. Torch-free."""

from __future__ import annotations

MARK = "weights differ: "
"""Begins what an engine's worker finds: an engine on another machine answers with text alone."""


class WeightsDifferError(RuntimeError):
    """An engine's weights, or what it computes with them, differ from the trainer's. Another attempt would, too."""
