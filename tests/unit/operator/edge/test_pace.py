"""When details of statuses are written: each job every few seconds, and all together so many a second."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.edge.pace import DETAIL_SECONDS, DETAILS_PER_SECOND, Pace


def test_a_job_by_itself_says_details_every_five_seconds() -> None:
    pace: Pace[str] = Pace()
    assert pace.wait("a", 100.0) == 0.0  # nothing is known of it, as after a start of the operator
    pace.written("a", 100.0)
    assert pace.wait("a", 101.0) == DETAIL_SECONDS - 1.0
    assert pace.wait("a", 100.0 + DETAIL_SECONDS) == 0.0


def test_many_jobs_that_start_at_once_say_less_and_one_that_is_left_says_more_again() -> None:
    pace: Pace[int] = Pace()
    for job in range(250):
        pace.written(job, 0.0)
    for job in range(250):
        pace.wait(job, 5.0)
    assert pace.wait(0, 5.0) == 250 / DETAILS_PER_SECOND - 5.0
    for job in range(1, 250):
        pace.written(job, 10.0)
    assert pace.wait(0, 10.0) <= 0.0


def test_jobs_that_are_gone_or_have_nothing_to_say_delay_nobody() -> None:
    pace: Pace[int] = Pace()
    for job in range(100):
        pace.written(job, 0.0)
        pace.wait(job, 1.0)
    for job in range(1, 50):
        pace.forget(job)
    for job in range(50, 100):
        pace.settled(job)
    assert pace.wait(0, DETAIL_SECONDS) == 0.0


@given(st.integers(1, 200), st.integers(5, 60))
def test_writes_stay_below_the_rate_and_each_job_has_its_turn(jobs: int, seconds: int) -> None:
    pace: Pace[int] = Pace()
    for job in range(jobs):
        pace.written(job, 0.0)
    writes = [0] * jobs
    for now in range(1, seconds * 2):
        for job in range(jobs):
            if pace.wait(job, now / 2) <= 0:
                pace.written(job, now / 2)
                writes[job] += 1
    assert sum(writes) <= DETAILS_PER_SECOND * seconds + jobs
    assert max(writes) - min(writes) <= 1
