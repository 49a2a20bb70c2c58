"""Host memory into which a rank copies what a checkpoint holds, so that training goes on while the copy is written.

The memory is pinned where the rank has a GPU, and kept for the next checkpoint: to allocate and pin it takes longer
than to copy.
"""

from __future__ import annotations

import copy
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from grpo_spec.words import counted
from grpo_workload.policy.memory.host_memory import HostMemory, aligned, bytes_of, wait
from grpo_workload.ranks.collectives import gather
from grpo_workload.storage.free_memory import free_memory

logger = logging.getLogger(__name__)

SHARE = 0.8
"""Share of a pod's free memory that the copies of its ranks may take. The rest is for what still grows in a run."""


class Staging:
    """One rank's copy of a checkpoint. Values of one `copy` stay valid until `clear`."""

    def __init__(self, device: torch.device, thread: ThreadPoolExecutor) -> None:
        """Take no memory yet. `thread` allocates it, and then also writes."""
        self._device, self._thread = device, thread
        self._memory: Future[HostMemory] | None = None
        self._used = 0

    def reserve(self, size: int) -> str | None:
        """Begin to allocate `size` bytes for this rank in the background, if all pods have the memory; collective.

        Returns what a pod lacks, the same on all ranks; then nothing is allocated.
        """
        host, sizes = socket.gethostname(), gather((socket.gethostname(), size))
        own = [needed for name, needed in sizes if name == host]
        free = free_memory()
        copies = f"copies of {counted(len(own), 'rank')} take {sum(own):,} bytes"
        lacks = f"on {host}, {copies}, and {free:,} bytes of memory are free"
        for lacking in gather(lacks if sum(own) > SHARE * free else None):
            if lacking:
                return lacking
        self._memory = self._thread.submit(self._allocate, size)
        return None

    def _allocate(self, size: int) -> HostMemory:
        try:
            return HostMemory(size, self._device)
        except torch.cuda.CudaError as error:
            logger.warning("host memory cannot be pinned, so checkpoints are copied more slowly: %s", error)
            return HostMemory(size, torch.device("cpu"))

    @property
    def is_reserved(self) -> bool:
        """Whether there is memory to copy to."""
        return self._memory is not None

    def copy(self, state: Any) -> Any:
        """Return a copy of `state` on the host, complete when this returns, that training does not change.

        Tensors that share a storage still do. Tensors for which no memory was reserved are copied to new memory.
        """
        slots: dict[int, Tensor] = {}
        found = list(tensors(state))
        memo: dict[int, Any] = {id(tensor): self._copy(tensor, slots) for tensor in found}
        for tensor in found:  # DeepSpeed's attributes, which torch.save writes, too
            vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
        copied = copy.deepcopy(state, memo)
        wait(self._device)
        return copied

    def values(self, tensor: Tensor) -> Tensor:
        """Return a copy of one tensor's values, contiguous and in a storage of its own."""
        copied = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        copied.copy_(tensor, non_blocking=True)
        wait(self._device)
        return copied

    def clear(self) -> None:
        """Let the next copies take the place of the last ones."""
        self._used = 0

    def _copy(self, tensor: Tensor, slots: dict[int, Tensor]) -> Tensor:
        storage = tensor.untyped_storage()
        if (slot := slots.get(storage._cdata)) is None:
            slot = slots[storage._cdata] = self._take(storage.nbytes())
            slot.copy_(bytes_of(storage), non_blocking=True)
        host = torch.empty(0, dtype=tensor.dtype).set_(
            slot.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(host, tensor.requires_grad)
        return host.requires_grad_(tensor.requires_grad)

    def _take(self, size: int) -> Tensor:
        start, self._used = self._used, self._used + aligned(size)
        assert self._memory is not None
        memory = self._memory.result().bytes
        if size == 0 or start + size > memory.nbytes:
            return torch.empty(size, dtype=torch.uint8)
        # A storage of its own, since safetensors refuses to write parts of one.
        return torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=size, offset=start)


def num_bytes_of(state: Any) -> int:
    """Return the bytes that a copy of `state` takes."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors(state)}
    return sum(aligned(storage.nbytes()) for storage in storages.values())


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value)
