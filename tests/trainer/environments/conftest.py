"""Sessions of tools and environments on real processes."""

import os

import pytest

from support.trainer.agents import COUNTER, USER, start


@pytest.fixture(scope="module")
def sessions():
    limited = {"function": f"{USER}:fail", "memoryLimit": "500Mi", "timeoutSeconds": 3}
    passing = {"function": f"{USER}:give", "env": ["SEARCH_KEY"]}
    environ = os.environ | dict.fromkeys(("SEARCH_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), "sesame")
    found = start(
        "multiply",
        "add",
        "meet",
        limited,
        passing,
        environments=[COUNTER],
        wants_reward=True,
        wants_state=True,
        environ=environ,
    )
    try:
        found.ready()
        yield found
    finally:
        found.close()


@pytest.fixture
def own():
    """Start sessions that end with the test."""
    started = []

    def begin(*tools, **settings):
        started.append(start(*tools, **settings))
        started[-1].ready()
        return started[-1]

    yield begin
    for one in started:
        one.close()
