"""Ask launchers for their progress.

A launcher that does not answer means unknown progress, which alone causes no action.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
from pydantic_core import from_json

from grpo_spec.reports import Progress

TIMEOUT_SECONDS = 2.0
MAX_BYTES = 1 << 20
"""Largest answer that is read: pods run users' images, and must not fill the operator's memory."""


class ProgressSource(Protocol):
    """Source of progress."""

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """Return the progress that the launcher at this address reports, or None if it does not answer in time."""
        ...


class HttpProgress:
    """GET http://<pod>:<status port>/progress."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), auto_decompress=False
        )

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """See ProgressSource."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            # Following a redirect would let a pod choose whom the operator asks.
            async with self._session.get(f"http://{host}:{port}/progress", allow_redirects=False) as answer:
                answer.raise_for_status()
                body = await _at_most(answer.content, MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError):
            return None
        try:
            said = None if body is None else from_json(body)
        except ValueError:  # no JSON
            return None
        return Progress.read(said) if isinstance(said, dict) else None

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def _at_most(content: aiohttp.StreamReader, limit: int) -> bytes | None:
    """Return the whole content, or None if it is longer than `limit` bytes."""
    try:
        await content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as ended:
        return ended.partial
    return None
