"""Compares weights, as they reach an engine, with the digests that the trainer sends behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from grpo_workload.weights.differ import ALTERED, MARK, WeightsAlteredError, WeightsDifferError, some
from grpo_workload.weights.digest import SUMS, digest


class Arrivals:
    """The weights that arrive in one push, and digests of them and of others."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where digests are computed, those of tensors elsewhere too."""
        self._device = device
        self._digests: list[Tensor] = []  # on the device until the end: reading one would wait for it
        self._arrived: list[tuple[str, int]] = []
        self._sent: Tensor | None = None

    def received(
        self, weights: Iterable[tuple[str, Tensor]], tell: Callable[[str, Tensor, int], None] = lambda *_: None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights without the digests that follow them (`with_sums`).

        Calls `tell` before each, with the position of its digest.
        """
        for name, tensor in weights:
            if name == SUMS:
                self._sent = tensor.clone()
                continue
            self._arrived.append((name, self.take(tensor, sums=False)))
            tell(name, tensor, self._arrived[-1][1])
            yield name, tensor

    def take(self, tensor: Tensor, *, sums: bool) -> int:
        """Compute a digest and return its position."""
        with _disable_current_modes():  # each would look at every operation
            self._digests.append(digest(tensor.to(self._device), sums=sums))
        return len(self._digests) - 1

    def read(self) -> list[list[int]]:
        """Return all digests."""
        found: list[list[int]] = torch.stack(self._digests).tolist() if self._digests else []
        return found

    def check(self) -> None:
        """Check that what came is what was sent.

        Raises:
            WeightsAlteredError: names the weights that changed on their way.
            WeightsDifferError: weights or digests are missing.
        """
        sent, found = [] if self._sent is None else self._sent.tolist(), self.read()
        if len(sent) != len(self._arrived):
            raise WeightsDifferError(f"{MARK}{len(self._arrived)} weights arrived with digests of {len(sent)}")
        if wrong := [name for (name, at), own in zip(self._arrived, sent, strict=True) if found[at] != own]:
            raise WeightsAlteredError(
                f"{ALTERED}{some(wrong)} changed between the trainer and the engine: memory, a device or the network "
                "has altered bits. Look at the nodes of both"
            )
