"""Offloads to the host's memory what checkpointed layers save for the backward pass, until that pass needs it.

With `gradientCheckpointing` a layer saves only its input, and computes the rest again. These inputs are then most of
the memory that grows with the tokens of a micro-batch. A separate stream copies each to the host while the next layers
compute, and back while the layer after it runs its backward pass, so the device waits only if the bus is too slow. The
idea is from torchtune's `OffloadActivations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 2**20  # smallest tensor that is worth a copy
IN_FLIGHT = 2  # number of tensors that may still be on their way to the host, and so held on the device
AHEAD = 2  # number of tensors that are fetched before they are asked for


@dataclass(slots=True, eq=False)
class _Parked:
    """A saved tensor in the host's memory."""

    host: Tensor
    place: int  # index in the order of the forward pass
    back: Tensor | None = None  # copy on the device, while it is needed
    arrival: Any = None  # event after which `back` may be read


class Activations:
    """Offloads the saved activations of one model; made once."""

    def __init__(self, device: torch.device) -> None:
        """Offload tensors of `device`."""
        self._device, self._kind = device, torch.get_device_module(device)
        self._stream = self._kind.Stream()
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._parked: list[_Parked] = []

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Offload what a forward pass within it saves; its backward pass must come before the next forward pass."""
        self._parked.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._park, self._fetch):
            yield
        self._settle(0)

    def _park(self, tensor: Tensor) -> Tensor | _Parked:
        if not _is_worthwhile(tensor):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type != "cpu")
        self._stream.wait_stream(self._kind.current_stream())
        with self._kind.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            left = self._stream.record_event()
        self._leaving.append((tensor, left))
        self._settle(IN_FLIGHT)
        parked = _Parked(host, len(self._parked))
        self._parked.append(parked)
        return parked

    def _settle(self, remaining: int) -> None:
        # The computing stream must wait for the copy before it may reuse the tensor's memory; usually it is long done.
        while len(self._leaving) > remaining:
            _, left = self._leaving.popleft()
            self._kind.current_stream().wait_event(left)

    def _fetch(self, saved: Tensor | _Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for parked in reversed(self._parked[max(0, saved.place - AHEAD) : saved.place + 1]):
            if parked.back is None:
                self._send_back(parked)
        back, saved.back = saved.back, None  # the graph keeps this object, but the tensor must not outlive its use
        assert back is not None
        self._kind.current_stream().wait_event(saved.arrival)
        return back

    def _send_back(self, parked: _Parked) -> None:
        parked.back = torch.empty_like(parked.host, device=self._device)
        self._stream.wait_stream(self._kind.current_stream())  # until here, another tensor may use this memory
        with self._kind.stream(self._stream):
            parked.back.copy_(parked.host, non_blocking=True)
            parked.arrival = self._stream.record_event()


def _is_worthwhile(tensor: Tensor) -> bool:
    # Offloading would not free what layers share (rotary embeddings), or weights and views of them.
    is_weight = tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)
    return tensor.requires_grad and not is_weight and tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES
