"""Asking rank 0's launcher how the training goes. Unreachable is `unknown`, and nothing is ever done about it."""

from __future__ import annotations

from typing import Protocol

import aiohttp
from pydantic import ValidationError

from grpo_workload.contract import Progress

TIMEOUT_SECONDS = 2.0


class ProgressSource(Protocol):
    """Where progress comes from."""

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """What the launcher at this address says; None when it does not answer in time."""
        ...


class HttpProgress:
    """GET http://<pod>:<status port>/progress."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """See ProgressSource."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(f"http://{host}:{port}/progress") as answer:
                answer.raise_for_status()
                return Progress.model_validate_json(await answer.read())
        except (aiohttp.ClientError, TimeoutError, ValidationError):
            return None

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


class NoProgress:
    """For clusters whose pods are not real."""

    async def fetch(self, ip: str, port: int) -> Progress | None:
        """Nothing is known."""
        return None
