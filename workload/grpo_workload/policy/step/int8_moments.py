"""AdamW whose moments are in 8 bits (arXiv:2110.02861), by bitsandbytes; the weights that it updates are in float32.

A moment is a byte for each element, which names one of 256 values, and a float32 for each block of 256 elements, by
which these are multiplied. Tensors of fewer than 4,096 elements keep theirs in float32. Imported late: see
`environment.show`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_spec.training import TrainingConfig
from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.ranks.environment import show

show("bitsandbytes")
from bitsandbytes import functional  # noqa: E402
from bitsandbytes.optim.adamw import AdamW8bit  # noqa: E402

BLOCK = 256
PIECE = 2**30
"""Elements that one call updates: bitsandbytes counts those of a GPU in 32 bits, and a partition may have more."""
PLAIN = {"exp_avg": "1", "exp_avg_sq": "2"}
"""Moments as torch's AdamW names them, and the last letter of bitsandbytes' names."""


class Int8Adam(AdamW8bit):
    """bitsandbytes' AdamW, for tensors of any size."""

    def __init__(self, parameters: list[Tensor], training: TrainingConfig) -> None:
        """Take the learning rate, betas and epsilon of `training`, but not its weight decay."""
        betas = training.adam_beta1, training.adam_beta2
        make: Any = super().__init__  # bitsandbytes is partly typed
        make(parameters, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon, weight_decay=0.0)

    def update_step(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
        """Update one tensor; bitsandbytes calls this."""
        state = self.state[p]
        if p.numel() <= PIECE or state["state1"].dtype != torch.uint8:
            update: Any = super().update_step
            update(group, p, gindex, pindex)
            return
        state["step"] += 1
        beta1, beta2 = group["betas"]
        weights, gradients = p.data.view(-1), p.grad.view(-1)
        for own, blocks in _pieces(p.numel()):
            functional.optimizer_update_8bit_blockwise(
                "adam",
                gradients[own],
                weights[own],
                state["state1"].view(-1)[own],
                state["state2"].view(-1)[own],
                beta1,
                beta2,
                0.0,  # beta3 and alpha, of another optimizer
                0.0,
                group["eps"],
                state["step"],
                group["lr"],
                state["qmap1"],
                state["qmap2"],
                state["absmax1"][blocks],
                state["absmax2"][blocks],
            )


@contextmanager
def plain_moments_arrive(deepspeed_engine: Any) -> Iterator[None]:
    """Within it, DeepSpeed may load a checkpoint that was converted: moments in float32 become 8 bits as they arrive.

    So no more than those of one of DeepSpeed's flat tensors exist at once. The states must be on the device.
    """
    optimizer = adam(deepspeed_engine)
    optimizer.state = arriving = _Arriving(optimizer)
    yield
    optimizer.state = defaultdict(dict, {tensor: dict(state) for tensor, state in arriving.items()})
    for parameter in deepspeed_engine.module.parameters():  # DeepSpeed's views would hold what has arrived
        if getattr(parameter, "_hp_mapping", None) is not None:
            parameter._hp_mapping.optim_fragment = {}


class _Arriving(dict[Tensor, Any]):
    """An optimizer's states by tensor, which begin when they are asked for."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __missing__(self, tensor: Tensor) -> dict[str, Any]:
        self[tensor], group = {}, self._optimizer.param_groups[0]
        given, group["params"] = group["params"], [tensor]  # between steps, ZeRO-3 has taken its tensors out
        self._optimizer.init_state(group, tensor, 0, 0)
        group["params"], self[tensor] = given, _State(self[tensor])
        state: _State = self[tensor]
        return state


class _State(dict[str, Any]):
    """A tensor's state, which takes torch's moments in place of its own."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in PLAIN:
            _quantize(value, self, PLAIN[key])
        else:
            super().__setitem__(key, int(value) if key == "step" else value)


def _quantize(values: Tensor, state: Mapping[str, Tensor], which: str) -> None:
    """Put float32 `values` into the moment `which` of a tensor's state."""
    kept = state[f"state{which}"]
    if kept.dtype != torch.uint8:
        kept.copy_(values)
        return
    for own, blocks in _pieces(kept.numel()):
        moments, constants = functional.quantize_blockwise(
            values.view(-1)[own], code=state[f"qmap{which}"], blocksize=BLOCK
        )
        kept.view(-1)[own] = moments
        state[f"absmax{which}"][blocks] = constants.absmax


def as_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tensor's saved state as torch's AdamW has it: moments in float32 and a step."""
    own = state.get(AdamW8bit._FSDP_WRAPPED_QUANT_STATE_KEY, state)
    moments = {name: _dequantized(own, which) for name, which in PLAIN.items()}
    return {"step": torch.tensor(float(state["step"]))} | moments


def _dequantized(state: Mapping[str, Tensor], which: str) -> Tensor:
    kept = state[f"state{which}"]
    if kept.dtype != torch.uint8:
        return kept
    moments: Tensor = functional.dequantize_blockwise(
        kept, absmax=state[f"absmax{which}"], code=state[f"qmap{which}"], blocksize=BLOCK
    )
    return moments


def _pieces(count: int) -> Iterator[tuple[slice, slice]]:
    """Yield the elements of each piece, and its blocks."""
    for start in range(0, count, PIECE):
        yield slice(start, start + PIECE), slice(start // BLOCK, (start + PIECE) // BLOCK)
