"""Whether the CUDA devices that the contract gives to a pod's ranks and engines are there: asked before any is started. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from grpo_workload.contract import Contract, Device

logger = logging.getLogger(__name__)

# The driver's own count is what ranks and engines will see, whatever brought the devices into the container. It is asked in a process of
# its own, which takes the driver's memory with it when it ends. 100 is CUDA_ERROR_NO_DEVICE.
_COUNT = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0, 0)
else:
    count = ctypes.c_int(0)
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    print(0 if error == 100 else error, count.value)
"""


async def check_devices(contract: Contract, pod: str) -> None:
    """Refuse a pod that sees fewer CUDA devices than the contract gives to its ranks and engines. ValueError names the devices."""
    if contract.device is not Device.CUDA:
        return
    users = device_users(contract, pod)
    present = await count_devices(_environ(contract, pod, os.environ))
    if present is not None and (complaint := complain(pod, users, present)):
        raise ValueError(complaint)


def device_users(contract: Contract, pod: str) -> dict[str, tuple[int, ...]]:
    """Who is to run on which local devices of `pod`: its ranks, and each of its engines."""
    users = {engine.name: engine.devices for engine in contract.engines if engine.pod == pod}
    ranks = {
        f"rank {member.rank_offset + local}": (device,)
        for member in contract.members
        if member.pod == pod
        for local, device in enumerate(member.devices or range(member.gpus))
    }
    return ranks | {f"engine {name}": devices for name, devices in users.items()}


def complain(pod: str, users: Mapping[str, Sequence[int]], present: int) -> str:
    """What is wrong when devices 0 to `present` - 1 are there; empty when nothing is."""
    absent = {user: missing for user, devices in users.items() if (missing := [device for device in devices if device >= present])}
    if not absent:
        return ""
    wanted = ", ".join(f"{user} on {_numbers(devices)}" for user, devices in absent.items())
    there = f"{_numbers(range(present))} alone" if present else "no CUDA device"
    needed = 1 + max(device for devices in users.values() for device in devices)
    return (
        f"pod {pod} is to run {wanted}, but it sees {there}: lower gpus of its group, or let the pod see {needed} whole GPUs "
        "(device.resourceName names them; processes see one MIG slice at most); without GPUs, device.type cpu would work"
    )


async def count_devices(environ: Mapping[str, str]) -> int | None:
    """CUDA devices that a process with these variables sees; None where the driver is there and does not tell, which ranks will report."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _COUNT, env=environ, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    error, count = map(int, output.split()) if process.returncode == 0 else (-1, 0)
    if error:
        logger.warning("CUDA's driver does not tell how many devices there are: error %d", error)
        return None
    return count


def _environ(contract: Contract, pod: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables under which the contract's numbers count: ranks on the first devices keep the container's CUDA_VISIBLE_DEVICES."""
    renumbered = any(engine.pod == pod for engine in contract.engines) or any(
        member.pod == pod and member.devices not in ((), tuple(range(member.gpus))) for member in contract.members
    )
    return {name: value for name, value in environ.items() if not (renumbered and name == "CUDA_VISIBLE_DEVICES")}


def _numbers(devices: Sequence[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
