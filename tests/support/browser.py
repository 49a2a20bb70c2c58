"""The page of `grpo ui` in a browser."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver

from grpo_cli.ui.others import Others
from grpo_cli.ui.server import serving
from grpo_cli.ui.source import Source
from grpo_devcluster.progress import wait_until


@contextmanager
def open_page(browser: webdriver.Chrome, source: Source, view: str = "", others: Others | None = None) -> Iterator[str]:
    """Open the page of `source` in the browser and yield its address; a thread serves it."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[str] = []
    ended = asyncio.Event()

    async def serve() -> None:
        async with serving(source, 0, None, others) as address:
            found.append(address)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        browser.get(f"{found[0]}#{view}")
        yield found[0]
    finally:
        browser.get("about:blank")
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    """Return the texts of all elements that match, in one call: the page may redraw itself between two calls."""
    found = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)", selector
    )
    return [str(one) for one in found]


def text(browser: webdriver.Chrome, selector: str) -> str:
    """Return the texts of all elements that match, joined."""
    return " ".join(texts(browser, selector))


def wait_for(what: str, holds: Callable[[], Any]) -> None:
    """Wait until `holds()` is true."""
    wait_until(lambda: bool(holds()), what, 90, interval=0.2)


def complaints(browser: webdriver.Chrome) -> list[str]:
    """Return the browser's warnings and errors."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
