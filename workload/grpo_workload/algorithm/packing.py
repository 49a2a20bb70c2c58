"""Sequences packed into micro-batches by their lengths."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], *, max_tokens: int, max_sequences: int, counts: Sequence[int] = ()) -> list[list[int]]:
    """Pack sequences of these lengths into few bins: first fit, longest sequence first (Johnson 1973).

    Bins hold indices into `lengths`. A bin holds at most `max_tokens` and `max_sequences`; a sequence longer than
    `max_tokens` gets a bin to itself. The fullest bin comes first, so memory runs out at once or never. `counts` says
    how many sequences each is; without it, each is one.
    """
    counts = counts or [1] * len(lengths)
    bins: list[list[int]] = []
    room: list[int] = []  # free tokens of each bin
    places: list[int] = []  # sequences that each bin has room for
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        fits = (bin_ for bin_, free in enumerate(room) if lengths[index] <= free and counts[index] <= places[bin_])
        chosen = next(fits, None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(max_tokens)
            places.append(max_sequences)
        bins[chosen].append(index)
        room[chosen] -= lengths[index]
        places[chosen] -= counts[index]
    return [bins[chosen] for chosen in sorted(range(len(bins)), key=lambda chosen: room[chosen])]
