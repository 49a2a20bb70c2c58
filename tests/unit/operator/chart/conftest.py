"""The program helm."""

from pathlib import Path

import pytest

from grpo_devcluster import binaries


@pytest.fixture(scope="session")
def helm() -> Path:
    try:
        return binaries.binary("helm")
    except FileNotFoundError:
        pytest.skip("helm is not built: make binaries")
