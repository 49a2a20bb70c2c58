"""The page of `grpo ui` in a browser."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from selenium import webdriver

from grpo_cli.ui.others import Others
from grpo_cli.ui.server import serving
from grpo_cli.ui.source import Source
from grpo_devcluster.progress import wait_until


@contextmanager
def in_a_thread(server: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    """Run a server in a thread, and yield what it yields."""
    ready, ended, loop = Future[Any](), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with server as found:
            ready.set_result(found)
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield ready.result(30)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


@contextmanager
def open_page(browser: webdriver.Chrome, source: Source, view: str = "", others: Others | None = None) -> Iterator[str]:
    """Open the page of `source` in the browser and yield its address; a thread serves it."""
    with in_a_thread(serving(source, 0, None, others)) as address:
        browser.get(f"{address}#{view}")
        try:
            yield address
        finally:
            browser.get("about:blank")


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
