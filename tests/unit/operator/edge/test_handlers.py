"""What an operator does while another one holds the Lease."""

import asyncio

from grpo_operator.edge.handlers import Options, _State
from grpo_operator.edge.mirror import Key
from grpo_operator.edge.workqueue import WorkQueue
from grpo_operator.metrics.instruments import Instruments

KEY = Key("ns", "job", "uid")


async def test_an_operator_that_stands_by_gathers_no_passes() -> None:
    """It may stand by for months, in which jobs come and go."""

    async def work(_: Key) -> None: ...

    state, instruments = _State(Options()), Instruments()
    state._gate = asyncio.Event()
    state._queue = WorkQueue(work, instruments, gate=state._gate)
    state._wake(KEY)
    assert state._queue.keys == frozenset()
    state._gate.set()
    state._wake(KEY)
    assert state._queue.keys == {KEY}
    await state._queue.close()
