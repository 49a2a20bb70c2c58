"""For all tests: what Hypothesis tries is the same in every run, and not timed, since a busy machine would fail tests by it.

`pytest tests/unit --hypothesis-profile=explore` tries other examples each time, and many more of them.

With workers (`-n 2`, as in scripts/test.sh) each folder of SHARED stays on one worker, and unit tests fill what is left.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SHARED = ("e2e", "trainer", "api")
"""Folders whose tests share what a machine has room for once (a cluster, vLLM, an API server), in the order in which they begin."""

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("same"), derandomize=False, max_examples=2000)
settings.load_profile("same")


def _begins(path: Path) -> int:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return SHARED.index(folder) if folder in SHARED else len(SHARED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a worker: work is handed out in this order, so what takes longest comes first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _begins(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Not `--dist loadgroup`: pytest-xdist 3.8 marks groups in test ids, which pytest 9.2 no longer lets it change, so that none forms."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for name in SHARED if file.startswith(f"tests/{name}/")), file)

    config.option.loadscopereorder = False  # by number of tests, which says nothing of how long they take
    return ByFolder(config, log)
