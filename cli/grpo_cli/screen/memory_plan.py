"""The answer of `grpo plan` as lines. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30
LEAST = GIB // 100  # bytes of the smallest part that has a row


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an answer."""
    for place in found["places"]:
        if any(total(parts) for parts in place["phases"].values()):
            yield from (*table(place), "")
    yield from verdict(found)


def verdict(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an answer says below its tables: whether the job fits, and edits with which it would."""
    largest = f"{found['tokens']} tokens"
    if found["chosenTokens"] > found["tokens"]:
        largest = f"{found['tokens']} tokens (one longest sequence); up to about {found['chosenTokens']} fit"
    yield f"micro-batch  {largest}"
    if found["unknown"]:
        yield f"activations are left out: the model does not run on the meta device ({found['unknown']})"
    if found["ratio"]:
        yield f"above 20B    {found['ratio']}"
    if found["isSafe"]:
        yield "fits"
        return
    yield f"does not fit: {found['why']}" if found["why"] else "fits, but tightly: fragments may take what is left"
    if not found["proposals"]:
        yield "no single edit would make it fit"
        return
    yield "one of these edits makes it fit, the fastest first (an order from a simple model, not a forecast):"
    for one in found["proposals"]:
        peak = max(total(parts) for place in one["places"] if not place["isHost"] for parts in place["phases"].values())
        yield f"  {one['field']}: {json.dumps(one['value'])}  ({peak / GIB:.1f} GiB at most)"


def table(place: Mapping[str, Any]) -> Iterator[str]:
    """Yield a place's table: parts by phase, in GiB."""
    phases = place["phases"]
    names = [name for parts in phases.values() for name, size in parts.items() if size >= LEAST]
    limit = "" if place["limit"] is None else f", of {place['limit'] / GIB:.1f} GiB"
    head = f"{place['name']}{' host memory' if place['isHost'] else ''}{limit}"
    width = max(len(head), *map(len, names), 20)
    yield f"{head:{width}}" + "".join(f"  {phase:>{max(8, len(phase))}}" for phase in phases)
    rows = {name: {phase: parts.get(name, 0) for phase, parts in phases.items()} for name in dict.fromkeys(names)}
    for name, row in (rows | {"total": {phase: total(parts) for phase, parts in phases.items()}}).items():
        cells = (f"{size / GIB:.2f}" if size >= LEAST else "" for size in row.values())
        yield f"{name:{width}}" + "".join(
            f"  {cell:>{max(8, len(phase))}}" for cell, phase in zip(cells, phases, strict=True)
        )


def total(parts: Mapping[str, int]) -> int:
    """Bytes of all parts."""
    return sum(parts.values())
