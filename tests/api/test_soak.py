"""Soaks: random work on a few jobs while watches expire, the operator is frozen and a second one comes and goes.

Every job ends as it should, nothing of it is left, no watch is, and all that others did beside it stands. `make soak`
takes an hour and looks for all leaks.
"""

from pathlib import Path

import pytest

from support.soak.foreign import ACTS
from support.soak.run import Options, soak

pytestmark = pytest.mark.long

TWENTY_MINUTES = 1200
FAULTS = ("expire watches", "freeze operator", "second operator")


def test_every_job_ends_as_it_should_under_random_work_and_faults(tmp_path: Path) -> None:
    work = {"seconds": 30, "jobs": 6, "round_seconds": 30}
    result = soak(tmp_path, Options(**work, fault_seconds=8, quiet_seconds=0, share_with_lease=0, kinds=FAULTS))
    assert set(result["faults"]) == set(FAULTS)
    assert result["lists"]["expired"], "no watch got a 410"


@pytest.mark.timeout(2 * TWENTY_MINUTES)
def test_nothing_of_others_is_lost_in_twenty_minutes_of_their_acts(tmp_path: Path) -> None:
    work = {"seconds": TWENTY_MINUTES, "jobs": 6, "round_seconds": 60, "share_of_others": 0.6}
    result = soak(tmp_path, Options(**work, fault_seconds=8, quiet_seconds=0, kinds=FAULTS, seed=1))
    assert set(result["acts of others"]) == set(ACTS)
