"""What checkpointed layers keep for the backward pass, moved to the host's memory while it is not needed.

With `gradientCheckpointing` a layer keeps its input alone, and makes the rest again; those inputs are then most of what grows with the
tokens of a micro-batch. Each is copied away while the next layers compute, and back while the layer behind it is at its backward pass, on
a stream of its own: the device waits only where the bus is slower than it. The idea is that of torchtune's `OffloadActivations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 2**20  # of a tensor that is worth a copy
IN_FLIGHT = 2  # tensors that are copied away, and still held, while the model goes on
AHEAD = 2  # tensors that are fetched before they are asked for


@dataclass(slots=True, eq=False)
class _Parked:
    """A tensor in the host's memory, and again on the device where `back` is set."""

    host: Tensor
    place: int
    back: Tensor | None = None
    arrival: Any = None


class Activations:
    """Moves the saved inputs of one model's layers; made once."""

    def __init__(self, device: torch.device) -> None:
        """For tensors on `device`."""
        self._device, self._kind = device, torch.get_device_module(device)
        self._stream = self._kind.Stream()
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._parked: list[_Parked] = []

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Within it a forward pass parks what it saves; its backward pass, which fetches it, may come later, but before the next one."""
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
        # The stream that computes waits before the tensor's memory is its to give out again; usually the copy is long done.
        while len(self._leaving) > remaining:
            _, left = self._leaving.popleft()
            self._kind.current_stream().wait_event(left)

    def _fetch(self, saved: Tensor | _Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for parked in reversed(self._parked[max(0, saved.place - AHEAD) : saved.place + 1]):
            if parked.back is None:
                self._send_back(parked)
        back, saved.back = saved.back, None  # this object lives as long as the graph, the tensor only while it is used
        assert back is not None
        self._kind.current_stream().wait_event(saved.arrival)
        return back

    def _send_back(self, parked: _Parked) -> None:
        parked.back = torch.empty_like(parked.host, device=self._device)
        self._stream.wait_stream(self._kind.current_stream())  # its memory may be another tensor's until here
        with self._kind.stream(self._stream):
            parked.back.copy_(parked.host, non_blocking=True)
            parked.arrival = self._stream.record_event()


def _is_worthwhile(tensor: Tensor) -> bool:
    # Of what layers share (rotary embeddings) and what stays anyway (weights, also transposed), nothing would be gained.
    is_weight = tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)
    return tensor.requires_grad and not is_weight and tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES
