"""What all tests share: no module that a test wrote outlives it, and the settings of Hypothesis.

Each run tries the same examples, without a deadline, as machines may be busy.

`pytest tests/unit --hypothesis-profile=explore` tries other examples each time, and many more.
"""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("same"), derandomize=False, max_examples=2000)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def modules_of_a_test_end_with_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote and imported is not found by the next test that writes one of the same name."""
    before = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]
