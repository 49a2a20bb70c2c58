"""What an operator does with events of jobs: which of them cause passes, and what is kept of them."""

import asyncio
import gc
import weakref
from contextvars import ContextVar

from grpo_operator.kopf_handlers import Options, _State
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.mirror import Key, Mirror
from grpo_operator.runtime.workqueue import WorkQueue
from support.control_plane.children import bare_job

KEY = Key("ns", "job", "uid")


class _Cause:
    """What kopf knows of an event, the job as dictionaries among it, while a handler runs."""


_cause: ContextVar[_Cause] = ContextVar("cause")


def _ready() -> _State:
    async def work(_: Key) -> None: ...

    state = _State(Options())
    state._gate = asyncio.Event()
    state._queue = WorkQueue(work, Instruments(), gate=state._gate)
    state._mirror = Mirror((), state._wake, lambda *_: None, lambda *_: None, lambda _: None)
    return state


async def test_an_operator_that_stands_by_gathers_no_passes() -> None:
    """It may stand by for months, in which jobs come and go."""

    state = _ready()
    state._wake(KEY)
    assert state._queue.keys == frozenset()
    state._gate.set()
    state._wake(KEY)
    assert state._queue.keys == {KEY}
    await state._queue.close()


async def test_a_pass_that_is_to_come_keeps_nothing_of_kopfs() -> None:
    """A job that runs always has a pass to come; kopf's copies of thousands of jobs took seconds to look through."""
    state = _ready()
    state._gate.set()

    async def handle() -> weakref.ref[_Cause]:
        cause = _Cause()
        _cause.set(cause)
        event = {"type": "ADDED", "object": bare_job(KEY.namespace, KEY.name, KEY.uid, 1)}
        await state.job_changed(KEY.namespace, KEY.name, KEY.uid, event)
        return weakref.ref(cause)

    kept = await asyncio.create_task(handle())
    await asyncio.sleep(0)  # asyncio lets go of the handler's task
    gc.collect()
    assert state._queue.keys == {KEY}
    assert kept() is None
    await state._queue.close()
