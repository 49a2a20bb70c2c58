"""An operator's answers to events of jobs: some cause passes, and little is kept of them."""

import asyncio
import gc
import weakref
from contextvars import ContextVar
from datetime import UTC, datetime

from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.reconcile import PassOptions
from grpo_operator.program import Program
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.kept import Key
from support.control_plane.children import bare_job
from support.control_plane.jobs import pod
from support.control_plane.memory_api import MemoryApi
from support.control_plane.memory_store import Store

KEY = Key("ns", "job", "uid")
ADDED = {"type": "ADDED", "object": bare_job(KEY.namespace, KEY.name, KEY.uid, 1) | {"spec": {}}}


class _Cause:
    """An event as kopf knows it, the job as dictionaries among it, while a handler runs."""


_cause: ContextVar[_Cause] = ContextVar("cause")


def _program() -> Program:
    now = datetime.now(UTC)
    return Program(Cluster(MemoryApi(Store())), (), lambda: now, lambda: 0.0, None, Instruments(), PassOptions())


async def test_an_operator_that_stands_by_gathers_no_passes() -> None:
    """It may stand by for months, in which jobs come and go."""
    program = _program()
    program.take_in(KEY, ADDED)
    assert program.queue.keys == frozenset()
    program.begin()
    assert program.queue.keys == {KEY}
    await program.close()


async def test_an_operator_that_stands_by_keeps_nothing_of_jobs_that_are_gone() -> None:
    program = _program()
    program.take_in(KEY, ADDED)
    program.jobs.of(KEY).deleted_pods.remember(pod("a"))
    program.take_in(KEY, ADDED | {"type": "DELETED"})
    assert list(program.jobs) == []


async def test_jobs_are_looked_at_when_what_their_site_sets_changes() -> None:
    program = _program()
    program.begin()
    program.mirror.keep_job(ADDED["object"])
    program.site_changed("another")
    assert program.queue.keys == frozenset()
    program.site_changed("ns")
    assert program.queue.keys == {KEY}
    await program.close()


async def test_a_pass_that_is_to_come_keeps_nothing_of_kopfs() -> None:
    """A job that runs always has a pass to come; kopf's copies of thousands of jobs took seconds to look through."""
    program = _program()
    program.begin()

    async def handle() -> weakref.ref[_Cause]:
        cause = _Cause()
        _cause.set(cause)
        program.take_in(KEY, ADDED)
        return weakref.ref(cause)

    kept = await asyncio.create_task(handle())
    await asyncio.sleep(0)  # asyncio lets go of the handler's task
    gc.collect()
    assert program.queue.keys == {KEY}
    assert kept() is None
    await program.close()
