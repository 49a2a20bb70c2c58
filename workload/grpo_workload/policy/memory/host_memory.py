"""Host memory that devices copy from and to fast, and the bytes of storages."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

ALIGNMENT = 512
"""Offsets of tensors in such memory are multiples of this many bytes, as on devices."""


class HostMemory:
    """Bytes of host memory for a device. They are freed with this object, once no tensor uses them."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate `size` bytes, and pin them where `device` is a GPU."""
        # Zeros, since the kernel assigns memory only when something is written to it.
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        if device.type == "cuda" and size:
            _register(self.bytes, device)
            # Memory that is freed while it is registered can never be registered again.
            weakref.finalize(self, _unregister, self.bytes)

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """Return `size` of the bytes from `start` on as a storage of its own."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        return torch.frombuffer(self.bytes.numpy(), dtype=torch.uint8, count=size, offset=start).untyped_storage()


def aligned(size: int) -> int:
    """Return the next multiple of `ALIGNMENT` from `size` on."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def wait(device: torch.device) -> None:
    """Wait until all copies that were begun on `device` have ended."""
    torch.get_device_module(device).synchronize()


def _register(host: Tensor, device: torch.device) -> None:
    """Pin these bytes for fast copies by CUDA; torch's own allocator would round their number up to a power of 2."""
    with torch.cuda.device(device):  # in a new thread CUDA would occupy the first GPU for it
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))


def _unregister(host: Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostUnregister(host.data_ptr()))
