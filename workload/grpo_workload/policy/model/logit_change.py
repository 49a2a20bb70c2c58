"""Changes of logits after the output layer by some models: a factor (Cohere, Granite) or a soft cap (Gemma).

`logprobs` never has all logits, so it does the same to a slice of them, and the model must leave the results alone.

Shapes: any; all is element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Fields of configurations, and the values that change nothing. Models read them there, or keep a copy. A property of
# that name (MiniCPM3) is none: the model scales hidden states, which stay as they are.
_FIELDS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
_MULTIPLIED = ("hyperclovax",)  # families whose logits are multiplied by logits_scaling; those of others are divided


@dataclass(frozen=True, slots=True)
class LogitChange:
    """softcap x tanh(scale x logit / softcap); without a soft cap scale x logit."""

    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(model: Any) -> LogitChange:
        """Return what `model`, a transformers model, does to its logits."""
        config = model.config.get_text_config()
        found: dict[str, Any] = {name: vars(config).get(name) or neutral for name, neutral in _FIELDS.items()}
        scaling = found["logits_scaling"]
        factor = scaling if config.model_type in _MULTIPLIED else 1 / scaling
        return LogitChange(found["logit_scale"] * factor, found["final_logit_softcapping"])

    def apply(self, logits: Tensor) -> Tensor:
        """Change `logits` in place, and return them."""
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, changed: Tensor) -> Tensor | float:
        """Return the derivative of changed logits by the output layer's, from changed logits."""
        if self.softcap is None:
            return self.scale
        return (changed / self.softcap).square_().neg_().add_(1).mul_(self.scale)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Within it, `model` returns what its output layer does."""
    owners = {id(owner): owner for owner in (model, model.config, model.config.get_text_config())}.values()
    found = [(owner, name, vars(owner)[name]) for owner in owners for name in _FIELDS if vars(owner).get(name)]
    try:
        for owner, name, _ in found:
            vars(owner)[name] = _FIELDS[name]  # some configurations check what is set, and take no None (Gemma 3n)
        yield
    finally:
        for owner, name, value in found:
            vars(owner)[name] = value
