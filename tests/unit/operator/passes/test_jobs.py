"""One call drops all that is kept about a job between passes, what is counted over all jobs too."""

import asyncio
from typing import Any

from grpo_operator.decide.second_look import News
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.jobs import Jobs
from grpo_operator.runtime.kept import Key
from support.control_plane.jobs import pod

KEY, OTHER = Key("ns", "job", "uid"), Key("ns", "other", "uid-2")


async def test_a_forgotten_job_leaves_nothing_and_delays_nobody() -> None:
    instruments = Instruments()
    jobs = Jobs(lambda: 0.0, instruments)
    understood: Any = object()
    for key in (KEY, OTHER):
        state = jobs.of(key)
        jobs.understand(key, understood)
        state.deleted_pods.remember(pod("a", uid="1"))
        state.answers.round = asyncio.create_task(asyncio.sleep(60))
        jobs.rates.written(state.writes, 0.0)
        jobs.rates.wait(state.writes, News.DETAILS, 1.0)
        jobs.expect(key, runs=True)
        instruments.noticed(key)
    asks, other = jobs.of(KEY).answers.round, jobs.of(OTHER)
    shared = jobs.intervals.seconds(runs=True)
    jobs.forget(KEY)
    await asyncio.gather(asks, return_exceptions=True)
    assert asks.cancelled()
    assert list(jobs) == [other]
    assert list(jobs._understood) == [OTHER]
    assert jobs.intervals.seconds(runs=True) == shared / 2
    assert [queue.jobs for queue in jobs.rates._queues.values() if queue.jobs] == [{other.writes}]
    assert list(instruments._noticed) == [OTHER]
    jobs.forget(KEY)  # as every pass over a job that is gone does
    jobs.forget(OTHER)
    assert list(jobs) == []
    assert jobs.intervals.seconds(runs=True) == 0.0
