"""Shared by all tests: no module that a test wrote outlives it, and the settings of Hypothesis.

Each run tries the same examples, without a deadline, as machines may be busy.

`pytest tests/unit --hypothesis-profile=explore` tries other examples each time, and many more.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from grpo_devcluster import binaries

if not Path("/dev/nvidiactl").exists():
    # Before torch is imported, also for the processes that tests start. The models are tiny: a second thread makes
    # nothing faster, and waits actively for the first, which takes ten times the CPU where all cores are busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # vLLM compiles a function of its sampler, and DeepSpeed three of an optimizer: seconds of CPU in each process.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("same"), derandomize=False, max_examples=2000)
settings.load_profile("same")


REAL_PROCESSES = {"api", "e2e", "trainer"}  # folders of tests that a busy machine can fail
"""Their tests get a second try. The closing line counts those that needed it, and what failed first is shown."""

MARKED = {"api", "e2e", "gpu"}  # folders whose tests have their name as a mark

ORDER = ["e2e", "api", "trainer", "gpu", "unit"]  # what cannot be shared out first, so that workers end together


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--oldest`: run tests/api on the oldest Kubernetes that the chart allows (`make test-oldest`)."""
    parser.addoption("--oldest", action="store_true", help="use the oldest Kubernetes that the chart allows")


def pytest_report_header(config: pytest.Config) -> str:
    """Name the Kubernetes of tests/api."""
    version = binaries.OLDEST_KUBERNETES if config.getoption("oldest") else binaries.KUBERNETES
    return f"Kubernetes {version}"


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folders, leave out what needs another Kubernetes, and put long ones first.

    Tests of real processes get a second try, and those of tests/gpu are skipped where torch finds no GPU.
    """
    other = "newer" if config.getoption("oldest") else "oldest"
    left_out = [item for item in items if item.get_closest_marker(other)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    for item in items:
        if folder(item) in MARKED:
            item.add_marker(folder(item))
        if folder(item) in REAL_PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if folder(item) == "gpu" and not sys.modules["torch"].cuda.is_available():  # all of them import it
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items.sort(key=lambda item: ORDER.index(folder(item)))


class OneClusterEach(LoadScopeScheduling):
    """With `-n`: one worker runs all tests of a cluster, as the cluster is one; files of other tests stay whole."""

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.split("/")[1]
        return folder if folder in {"e2e", "api"} else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneClusterEach:
    """Deal the tests out to the workers of `-n`."""
    config.option.loadscopereorder = False  # ORDER is what we want
    return OneClusterEach(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests needed a second try: it may be a fault that shows once in a hundred runs."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(autouse=True)
def modules_of_a_test_end_with_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote and imported is not found by the next test that writes one of the same name."""
    before = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]
