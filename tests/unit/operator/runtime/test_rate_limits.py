"""When statuses without urgent news are written: each job every few seconds, and all together so many a second."""

import heapq
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.decide.second_look import News
from grpo_operator.runtime.rate_limits import AHEAD_SECONDS, RATES, WriteRates, Writes

DETAILS, PROGRESS = News.DETAILS, News.PROGRESS
SECONDS, ALL_JOBS = RATES[DETAILS].seconds, RATES[DETAILS].all_jobs


def written(number: int) -> tuple[WriteRates, list[Writes]]:
    """Return jobs of all of which a status was written at 0."""
    pace, jobs = WriteRates(), [Writes() for _ in range(number)]
    for job in jobs:
        pace.written(job, 0.0)
    return pace, jobs


def test_a_job_by_itself_says_details_every_five_seconds() -> None:
    pace, job = WriteRates(), Writes()
    assert pace.wait(job, DETAILS, 100.0) == 0.0  # nothing is known of it, as after a start of the operator
    pace.written(job, 100.0)
    assert pace.wait(job, DETAILS, 101.0) == SECONDS - 1.0
    assert pace.wait(job, DETAILS, 100.0 + SECONDS) == 0.0


def test_many_jobs_that_start_at_once_say_less_and_one_that_is_left_says_more_again() -> None:
    pace, jobs = written(250)
    for job in jobs:
        pace.wait(job, DETAILS, 5.0)
    assert pace.wait(jobs[0], DETAILS, 5.0) == 250 / ALL_JOBS - 5.0
    for job in jobs[1:]:
        pace.written(job, 10.0)
    assert pace.wait(jobs[0], DETAILS, 10.0) <= 0.0


def test_jobs_that_are_gone_or_have_nothing_to_say_delay_nobody() -> None:
    pace, jobs = written(100)
    for job in jobs:
        pace.wait(job, DETAILS, 1.0)
    for job in jobs[1:]:
        pace.settled(job)
    assert pace.wait(jobs[0], DETAILS, SECONDS) == 0.0


def test_news_that_cannot_wait_are_written_at_once_and_delay_nobody() -> None:
    pace, jobs = written(100)
    for job in jobs:
        pace.wait(job, DETAILS, 0.0)
        assert pace.wait(job, News.URGENT, 0.0) == 0.0
    assert pace.wait(jobs[0], DETAILS, SECONDS) == 0.0


def test_jobs_that_train_do_not_delay_those_that_start() -> None:
    pace, jobs = written(1000)
    for job in jobs:
        pace.wait(job, PROGRESS, 50.0)
    assert pace.wait(jobs[999], PROGRESS, 50.0) == 1000 / RATES[PROGRESS].all_jobs - 50.0
    assert pace.wait(jobs[999], DETAILS, 50.0) <= 0.0
    fewer = pace.wait(jobs[998], PROGRESS, 50.0)
    assert fewer < 1000 / RATES[PROGRESS].all_jobs - 50.0, "one has only details to say now"


@pytest.mark.parametrize("spread", [0.0, 15.0])
@pytest.mark.parametrize("is_new", [True, False])
def test_many_jobs_that_train_write_one_after_the_other(spread: float, is_new: bool) -> None:
    """Jobs that look at once or over some seconds; either their first progress comes, or nothing is known of them."""
    pace, chance, times, said = WriteRates(), Random(0), list[float](), dict[int, int]()
    jobs = [Writes() for _ in range(600)]
    passes = [(chance.uniform(0, spread), job) for job in range(600)]
    heapq.heapify(passes)
    while passes[0][0] < 300:
        now, job = heapq.heappop(passes)
        step, until_next = int((now + job % 30) / 30), 12.0
        if job not in said and is_new:
            pace.written(jobs[job], now)
            said[job] = step
        elif said.get(job) == step:
            pace.settled(jobs[job])
        elif left := pace.wait(jobs[job], PROGRESS, now):
            until_next = min(until_next, left)
        else:
            pace.written(jobs[job], now)
            said[job] = step
            times.append(now)
        heapq.heappush(passes, (now + until_next, job))
    rate, some = RATES[PROGRESS].all_jobs, 30
    for earlier, later in zip(times, times[some:], strict=False):
        assert later - earlier > some / rate - AHEAD_SECONDS - 0.01
    assert len(times) > 0.9 * rate * (300 - 75), "while all have something to say, no turn is lost"


@given(st.sampled_from(sorted(RATES, key=str)), st.integers(1, 200), st.integers(5, 60))
def test_writes_stay_below_the_rate_and_each_job_has_its_turn(news: News, jobs: int, seconds: int) -> None:
    pace, kept = WriteRates(), [Writes(0.0) for _ in range(jobs)]
    writes = [0] * jobs
    for now in range(1, seconds * 2):
        for job in range(jobs):
            if pace.wait(kept[job], news, now / 2) <= 0:
                pace.written(kept[job], now / 2)
                writes[job] += 1
    assert sum(writes) <= RATES[news].all_jobs * (seconds + AHEAD_SECONDS) + 1
    # A job whose turn is within AHEAD_SECONDS may be a round ahead of one that has not written in this round yet.
    assert max(writes) - min(writes) <= 2
