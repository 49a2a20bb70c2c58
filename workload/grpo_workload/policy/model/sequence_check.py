"""Whether several ranks can share the sequences of a model: its attention alone exchanges what they have."""

from __future__ import annotations

from typing import Any

from grpo_spec.errors import ConfigError
from grpo_workload.policy.model.attention import VARLEN, unpackable
from grpo_workload.policy.model.vision import has_vision


def check_sequence(model_config: Any, implementation: str, size: int) -> None:
    """Refuse a model whose sequences `size` ranks cannot share.

    Raises:
        ConfigError: it names what stands in the way, and a size that would work.
    """
    text = model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    why = None
    if implementation != VARLEN:
        why = f"model.attention {implementation} sees the tokens of one rank alone (varlen would work)"
    elif types := unpackable(model_config):
        why = f"layers of the types {', '.join(sorted(types))} carry a state from one rank's tokens to the next's"
    elif has_vision(model_config):
        why = f"{model_config.model_type} is trained with images, whose tokens cannot be divided"
    elif heads < size:
        why = f"{model_config.model_type} has {heads} attention heads, and each rank needs one"
    if why is not None:
        raise ConfigError(f"parallelism.sequence: {size} ranks cannot share sequences: {why}; 1 would work")
