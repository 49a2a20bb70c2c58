"""/healthz says what is stuck: a task that has ended, a pass that does not end, an event loop that stands still."""

import asyncio
import subprocess
import sys

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from grpo_operator.runtime import health
from grpo_operator.runtime.health import PASS_SECONDS, ended_tasks, health_page, stuck_passes
from grpo_operator.runtime.http_server import Handler


async def _ask(page: Handler) -> tuple[int, str]:
    application = web.Application()
    application.router.add_get("/healthz", page)
    async with (
        TestServer(application) as server,
        ClientSession() as session,
        session.get(server.make_url("/healthz")) as a,
    ):
        return a.status, await a.text()


async def test_a_page_shows_every_complaint_and_fails_while_there_is_one() -> None:
    wrong = ["the mirror is away", "so is the queue"]
    page = health_page(lambda: wrong)
    assert await _ask(page) == (503, "the mirror is away\nso is the queue\n")
    wrong.clear()
    assert await _ask(page) == (200, "ok\n")


async def test_a_task_that_has_ended_is_named_with_its_error() -> None:
    async def fails() -> None:
        raise ValueError("no luck")

    async def returns() -> None:
        pass

    tasks = [
        asyncio.create_task(fails(), name="watch of pods"),
        asyncio.create_task(returns(), name="resync"),
        asyncio.create_task(asyncio.Event().wait(), name="cancelled"),
        asyncio.create_task(asyncio.Event().wait(), name="runs"),
    ]
    tasks[2].cancel()
    await asyncio.wait(tasks[:3])
    assert list(ended_tasks(tasks)) == [
        "the task 'watch of pods' has ended: ValueError: no luck",
        "the task 'resync' has ended: it returned",
        "the task 'cancelled' has ended: it was cancelled",
    ]
    tasks[3].cancel()


def test_a_pass_that_does_not_end_is_named() -> None:
    began = {"ns/stuck": 100.0, "ns/slow": 101.0}
    assert list(stuck_passes(began, 100.0 + PASS_SECONDS)) == []
    assert list(stuck_passes(began, 101.0 + PASS_SECONDS)) == ["the pass over ns/stuck has not ended for 601 s"]


def test_the_log_shows_where_the_event_loop_stands_still() -> None:
    program = f"""
import asyncio, time
from grpo_operator.runtime import health
health.LOOP_SECONDS = 0.2
def stands_still():
    time.sleep(1)
async def main():
    watch = asyncio.create_task(health.{health.show_standstill.__name__}())
    await asyncio.sleep(0.5)
    stands_still()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("in stands_still") == 1
