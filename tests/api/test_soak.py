"""A short soak: random work on a few jobs while watches expire, the operator is frozen and a second one comes and goes.

Every job ends as it should, nothing of it is left, and no watch is. `make soak` takes an hour and looks for all leaks.
"""

from pathlib import Path

import pytest

from support.soak.run import Options, soak

pytestmark = pytest.mark.long

FAULTS = ("expire watches", "freeze operator", "second operator")


def test_every_job_ends_as_it_should_under_random_work_and_faults(tmp_path: Path) -> None:
    work = {"seconds": 30, "jobs": 6, "round_seconds": 30}
    result = soak(tmp_path, Options(**work, fault_seconds=8, quiet_seconds=0, share_with_lease=0, kinds=FAULTS))
    assert set(result["faults"]) == set(FAULTS)
    assert result["lists"]["expired"], "no watch got a 410"
