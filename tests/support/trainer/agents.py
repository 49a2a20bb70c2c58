"""Sessions of tools and environments on real processes."""

import os
from pathlib import Path

from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.processes import Processes
from grpo_workload.environments.sessions import RankSessions
from support.trainer.places import config_of

USER = "support.trainer.user_tools"
COUNTER = {"name": "counter", "factory": f"{USER}:Counter", "params": {"start": 3}}


def make_config(*tools, environments=()):
    """Return a job with tools, by name in `user_tools` or as the job has them, and environments."""
    named = [{"function": f"{USER}:{tool}"} if isinstance(tool, str) else tool for tool in tools]
    return config_of(tools=named, environments=list(environments))


def hanging_rank(sessions):
    """Return a program that calls a tool of the environment `counter`, which hangs: argv[1] is its folder.

    `sessions`: the expression that makes its sessions.
    """
    return f"""
import asyncio, sys
from grpo_workload.environments.base import ToolCall
from support.trainer.agents import COUNTER, make_config, start
from support.trainer.environment_pods import connect

sessions = {sessions}
sessions.ready()

async def hang():
    session = sessions.open({{}}, 1)
    await session.reset()
    await session.call([ToolCall(name="hang", arguments={{"folder": sys.argv[1]}})], 600)

asyncio.run(hang())
"""


def start(*tools, environments=(), wants_reward=False, wants_state=False, environ=None):
    """Start the processes of tools and environments, as `make_config` takes them."""
    config = make_config(*tools, environments=environments)
    processes = Processes(config.tools, config.environments, environ or os.environ)
    sessions = RankSessions(processes, config, wants_reward=wants_reward)
    sessions.wants_state = wants_state
    return sessions


async def act(sessions, *calls, seconds=60.0, seed=1, **row):
    """Return the results of one turn of a new episode."""
    session = sessions.open(row, seed)
    try:
        await session.reset()
        return await session.call([ToolCall(name=name, arguments=arguments) for name, arguments in calls], seconds)
    finally:
        await session.close()


async def ask(session, name, **arguments):
    """Make one call, and return its result's text."""
    return (await session.call([ToolCall(name=name, arguments=arguments)], 60))[0].content


def is_alive(pid):
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid):
    """Return the process that started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def children_of(pid):
    """Return the processes that it started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
