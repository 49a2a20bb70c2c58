"""Sessions of tools and environments on real processes."""

import os
from contextlib import closing

import pytest

from support.trainer.agents import COUNTER, USER, start


@pytest.fixture(scope="module")
def sessions():
    limited = {"function": f"{USER}:fail", "memoryLimit": "500Mi", "timeoutSeconds": 3}
    passing = {"function": f"{USER}:give", "env": ["SEARCH_KEY"]}
    environ = os.environ | dict.fromkeys(("SEARCH_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), "sesame")
    wanted = {"environments": [COUNTER], "wants_reward": True, "wants_state": True, "environ": environ}
    with closing(start("multiply", "add", "meet", limited, passing, **wanted)) as found:
        found.ready()
        yield found


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
