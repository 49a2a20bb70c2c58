"""Description of tools and environments on pods: a rank asks for it at its start, and waits until pods are ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import Description, EnvironmentLostError
from grpo_workload.environments.pods.choice import Pod, complaint
from grpo_workload.environments.pods.messages import DESCRIBE_PATH, State
from grpo_workload.environments.user_process import IMPORT_SECONDS

START_SECONDS = IMPORT_SECONDS + 60
_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
_MOST_AT_ONCE = 8  # pods of a group that a rank asks in a second
_MAX_BYTES = 16 << 20


async def describe(client: aiohttp.ClientSession, contract: Contract, pods: Sequence[Pod]) -> Description:
    """Return the description of all tools and environments, once a pod of each group is ready.

    Raises:
        ConfigError: see `base.Host.ready`, or groups describe the same tools differently.
        EnvironmentLostError: no pod of a group is ready after START_SECONDS.
    """
    in_order = sorted(pods, key=lambda pod: pod.place)
    groups = [[pod for pod in in_order if pod.group == group.name] for group in contract.environment_pods]
    found = await asyncio.gather(*(_describe_group(client, group) for group in groups))
    together = Description(tools=found[0].tools, environments={})
    for group, one in zip(contract.environment_pods, found, strict=True):
        known = {name: together.environments.get(name, own) for name, own in one.environments.items()}
        if one.tools != together.tools or one.environments != known:
            raise ConfigError(
                f"environmentPods.groups[{group.name}]: its tools or environments have other names, arguments or "
                "texts than those of the groups before it; give all groups the same code"
            )
        together.environments.update(one.environments)
    return together


async def _describe_group(client: aiohttp.ClientSession, pods: Sequence[Pod]) -> Description:
    begun, first = time.monotonic(), 0
    while True:
        asked = [pods[(first + number) % len(pods)] for number in range(min(len(pods), _MOST_AT_ONCE))]
        first += len(asked)
        states = await asyncio.gather(*(_ask(client, pod) for pod in asked))
        for state in states:
            if state.description is not None:  # one pod is enough, whatever others say
                return state.description
        for state in states:
            if state.refused is not None:
                raise ConfigError(state.refused)
        for pod, state in zip(asked, states, strict=True):
            pod.trouble = state.away
        if (seconds := time.monotonic() - begun) >= START_SECONDS:
            raise EnvironmentLostError("connection", complaint(pods, seconds))
        await asyncio.sleep(_PAUSE_SECONDS)


async def _ask(client: aiohttp.ClientSession, pod: Pod) -> State:
    """Return the state of a pod; why it has none as `away`."""
    try:
        async with asyncio.timeout(_REQUEST_SECONDS), client.get(f"http://{pod.address}{DESCRIBE_PATH}") as response:
            response.raise_for_status()
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > _MAX_BYTES:
                    return State(away=f"its description has more than {_MAX_BYTES} bytes")
        return State.model_validate_json(bytes(content))
    except TimeoutError:
        return State(away=f"did not answer within {_REQUEST_SECONDS:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return State(away=f"{type(error).__name__}: {error}")
    except ValueError:
        return State(away="sent something that is no description")
