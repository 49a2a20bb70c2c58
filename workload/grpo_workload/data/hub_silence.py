"""A line that says that the hub does not answer. Its client asks again for a minute or two, and prints nothing."""

from __future__ import annotations

import sys
import threading
from typing import Any

from huggingface_hub import get_session

from grpo_spec.reports import WAITS_FOR_HUB

SECONDS = 4


def announce_silence() -> None:
    """Write one line to standard error once the hub has left a request without an answer for SECONDS."""
    timers: list[threading.Timer] = []  # of the request that waits; it stays once its line is written

    def begins(request: Any) -> None:
        if not timers:
            timers.append(threading.Timer(SECONDS, _say, [f"{request.url.scheme}://{request.url.netloc.decode()}"]))
            timers[0].daemon = True
            timers[0].start()

    def is_answered(_: object) -> None:
        if timers and timers[0].is_alive():
            timers.pop().cancel()

    session = get_session()
    hooks = session.event_hooks
    session.event_hooks = {"request": [*hooks["request"], begins], "response": [*hooks["response"], is_answered]}


def _say(hub: str) -> None:
    advice = "HF_HUB_OFFLINE=1 looks into the cache alone"
    said = f"{WAITS_FOR_HUB}{hub} has not answered for {SECONDS} s, and is asked again for up to two minutes; {advice}"
    print(said, file=sys.stderr, flush=True)  # noqa: T201 - the command line passes it on
