"""The control plane of the tests is of the release that is pinned."""

import json
from collections.abc import Callable

import pytest

Kubectl = Callable[..., str]


def test_reports_the_pinned_version(kubectl: Kubectl, pytestconfig: pytest.Config) -> None:
    pinned = "v1.30.14" if pytestconfig.getoption("oldest") else "v1.37.2"
    assert json.loads(kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == pinned
