"""Result or exception of a user's tool, as its process sends it to the rank."""

from __future__ import annotations

import math
from typing import Any

MAX_RESULT = 1 << 20
"""Most letters of a result that leave the process."""
_CONNECTION_NAMES = (
    *("ConnectionError", "ConnectError", "ConnectionClosed", "TransportError"),
    *("ConnectTimeout", "ReadTimeout", "TimeoutException"),
)
"""Ends of the names of such exceptions, or of their bases: requests, urllib3, aiohttp, openai, httpx, websockets."""


class ImageResultError(Exception):
    """A tool returned an image."""


class ResultError(Exception):
    """A method of an environment returned something else than it must."""


def as_text(result: Any) -> str:
    """Return a result as text, as TRL does: `str` of anything, and the texts of content blocks.

    Raises ImageResultError, and whatever `__str__` raises.
    """
    if _is_image(result):
        raise ImageResultError
    blocks = result if isinstance(result, list) and result and all(map(_is_block, result)) else None
    text = str(result) if blocks is None else "".join(str(block["text"]) for block in blocks)
    if len(text) > MAX_RESULT:
        text = f"{text[:MAX_RESULT]}\n[cut: the result has {len(text)} letters]"
    # Tokenizers take no lone surrogates, which texts that were cut inside of a letter may have.
    return text.encode(errors="replace").decode()


def as_error(message: str) -> str:
    """Return what the model reads of a call that failed, as in TRL."""
    return as_text({"error": message})


def as_reward(result: Any) -> float:
    """Return what `get_reward` returned. ResultError if it is no finite number."""
    try:
        value = math.nan if isinstance(result, str | bytes | bytearray) else float(result)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        raise ResultError(f"returned {str(result)[:200]!r} ({type(result).__name__}), not a finite number")
    return value


def is_connection(error: BaseException) -> bool:
    """Whether an environment failed, not what the model asked of it: a connection, or whatever says so of itself."""
    named = any(kind.__name__.endswith(_CONNECTION_NAMES) for kind in type(error).__mro__)
    return named or isinstance(error, ConnectionError | TimeoutError) or bool(getattr(error, "is_infrastructure", 0))


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text" and "text" in value


def _is_image(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_image, value))
    is_block = isinstance(value, dict) and value.get("type") in ("image", "image_url")
    return is_block or any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__)
