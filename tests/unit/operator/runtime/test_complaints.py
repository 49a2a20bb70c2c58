"""Expected errors cost the log one line each, rarely repeated, whoever writes it; faults keep their traceback."""

import logging

import pytest

from grpo_operator.runtime.complaints import REPEAT_SECONDS, Complaints, drop_traceback
from grpo_operator.runtime.errors import EarlyError


def test_a_complaint_is_repeated_rarely_and_each_subject_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    complaints = Complaints(logging.getLogger("test"), lambda: now[0])
    for second in range(int(REPEAT_SECONDS) + 1):
        now[0] = float(second)
        complaints.say("rights", "no %s", "rights")
        if second >= 7:
            complaints.say("crd", "no CRD")
    assert caplog.messages == ["no rights", "no CRD", "no rights"]


@pytest.mark.parametrize(
    ("error", "shown", "traceback"),
    [
        (ConnectionRefusedError(111, "refused"), "watcher has failed (the API server cannot be reached", False),
        (EarlyError(), "watcher has failed (the API server does not know GRPOJobs", False),
        (KeyError("name"), "watcher has failed", True),
    ],
)
def test_only_a_fault_has_a_traceback_in_the_log_of_kopf_too(error: Exception, shown: str, traceback: bool) -> None:
    record = logging.LogRecord("kopf", logging.ERROR, "", 0, "%s has failed", ("watcher",), (type(error), error, None))
    assert drop_traceback(record)
    text = logging.Formatter().format(record)
    assert text.startswith(shown)
    assert (len(text.splitlines()) > 1) is traceback
