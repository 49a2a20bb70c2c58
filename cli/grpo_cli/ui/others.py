"""Runs whose curves a page can show beside its own: jobs of the namespace, or further folders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_cli.ui.history import MAX_POINTS, decimated
from grpo_cli.ui.source import Source, SourceError


class Others:
    """The runs to compare with. `names` lists them now; `begin` makes a source, for a run that a reader has chosen."""

    def __init__(self, names: Callable[[], Sequence[str]], begin: Callable[[str], Source]) -> None:
        self._names, self._begin = names, begin
        self._begun: dict[str, Source] = {}
        self._lock = asyncio.Lock()  # two browsers do not start two pods for the same files

    async def names(self) -> list[str]:
        """Return the names of all runs that may be chosen. Raises SourceError."""
        return list(await asyncio.to_thread(self._names))

    async def curves(self, name: str) -> dict[str, Any]:
        """Return the metrics of a run, all steps, averaged to a bounded number of points. Raises SourceError."""
        async with self._lock:
            if name not in self._begun:
                if name not in await self.names():
                    raise SourceError(f"there is no run {name} to compare with")
                self._begun[name] = await asyncio.to_thread(self._begin, name)
            source = self._begun[name]
            await asyncio.to_thread(source.refresh)
        points, _ = decimated(source.shown.history.metrics, MAX_POINTS)
        return {"name": name, "metrics": points, "note": source.shown.note}


def further_folders(sources: Mapping[str, Source]) -> Others:
    """Return the folders of a command line as runs to compare with."""
    return Others(lambda: list(sources), sources.__getitem__)
