"""Errors of the API server that anybody expects: one line each, rarely repeated, and never a traceback.

A traceback says where this program stood, which does not matter while the operator's roles, its CRD or the API server
itself are missing, as in the first minutes of an installation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

from grpo_operator.runtime.errors import expected

REPEAT_SECONDS = 300.0
"""Seconds after which a complaint that still holds is written again."""


class Complaints:
    """Writes warnings about a subject to a log: one, and another when `REPEAT_SECONDS` have passed.

    `monotonic` gives seconds; only their differences matter.
    """

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log, self._monotonic = log, monotonic
        self._said: dict[Hashable, float] = {}

    def say(self, subject: Hashable, text: str, *arguments: object) -> None:
        """Write a warning, unless one about the subject was written a short time ago."""
        now = self._monotonic()
        if now < self._said.get(subject, -REPEAT_SECONDS) + REPEAT_SECONDS:
            return
        self._said = {one: at for one, at in self._said.items() if now < at + REPEAT_SECONDS} | {subject: now}
        self._log.warning(text, *arguments)


def drop_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback of an expected error by one line; a filter for handlers of the log. kopf writes others."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Exception) and (known := expected(error)) is not None:
        record.msg, record.args = f"{record.getMessage().splitlines()[0]} ({known.text})", None
        record.exc_info = record.exc_text = None
    return True
