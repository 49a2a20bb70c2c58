"""Asserts which texts are times, and that a status is written with the times that were read."""

import pytest

from grpo_operator.api.status import read_status
from grpo_operator.api.times import known_time, rfc3339
from grpo_spec.schema import dump


@pytest.mark.parametrize(
    ("said", "as_written"),
    [
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T02:00:00+02:00", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00.123456Z", "2026-01-01T00:00:00.123456Z"),
        *((odd, None) for odd in ("2026-01-01T00:00:00", "1969-12-31T23:59:59Z", "9000-01-01T00:00:00Z")),
        *((odd, None) for odd in ("soon", "", 5, None)),
    ],
)
def test_a_time_has_a_zone_and_is_written_in_utc(said: object, as_written: str | None) -> None:
    time = known_time(said)
    assert (time and rfc3339(time)) == as_written
    stored = {"startTime": said, "usage": {"time": said}}
    assert {"startTime", "usage"} & dump(read_status(stored)).keys() == (
        {"startTime", "usage"} if as_written else set()
    )
    assert dump(read_status(stored)).get("startTime") == as_written


def test_an_outcome_without_a_time_is_known() -> None:
    member = {"pod": "p", "role": "trainer", "uid": "u"}
    outcome = {"exitCode": 1, "reason": "r", "message": "m"}
    for stored in (outcome, outcome | {"finishedAt": ""}):
        status = dump(read_status({"members": [member | {"outcome": stored}]}))
        assert status["members"][0]["outcome"] == outcome
