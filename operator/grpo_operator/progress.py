"""Asking rank 0's launcher how the training goes. Unreachable is `unknown`, and nothing is ever done about it."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
from pydantic import ValidationError

from grpo_workload.contract import Progress

TIMEOUT_SECONDS = 2.0
MAX_BYTES = 1 << 20
"""Of an answer. Whoever made the pod's image decides what it answers, and the operator's memory is everybody's."""


class ProgressSource(Protocol):
    """Where progress comes from."""

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """What the launcher at this address says; None when it does not answer in time."""
        ...


class HttpProgress:
    """GET http://<pod>:<status port>/progress."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), auto_decompress=False)

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """See ProgressSource."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            # A redirect would have the operator ask whom the pod wants.
            async with self._session.get(f"http://{host}:{port}/progress", allow_redirects=False) as answer:
                answer.raise_for_status()
                body = await _at_most(answer.content, MAX_BYTES)
                return None if body is None else Progress.model_validate_json(body)
        except (aiohttp.ClientError, TimeoutError, ValidationError):
            return None

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def _at_most(content: aiohttp.StreamReader, limit: int) -> bytes | None:
    """The whole of it, or None where it is longer."""
    try:
        await content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as all_of_it:
        return all_of_it.partial
    return None


class NoProgress:
    """For clusters whose pods are not real."""

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """Nothing is known."""
        return None
