"""Checks, before anything starts, that the CUDA devices of a pod's ranks and engines exist. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from grpo_spec.contract import Contract, Device
from grpo_spec.errors import ConfigError
from grpo_spec.words import counted

logger = logging.getLogger(__name__)

# The driver's own count is what ranks and engines will see, however the devices got into the container. A separate
# process asks for it, so that the driver's memory is freed afterwards. 100 is CUDA_ERROR_NO_DEVICE.
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
    """Raise ConfigError if the pod sees fewer CUDA devices than the contract gives to its ranks and engines."""
    if contract.device is not Device.CUDA:
        return
    users = device_users(contract, pod)
    present = await count_devices(_environ(contract, pod, os.environ))
    if present is not None and (message := describe_missing(pod, users, present)):
        raise ConfigError(message)


def device_users(contract: Contract, pod: str) -> dict[str, tuple[int, ...]]:
    """Return the local devices of each rank and engine of `pod`."""
    users = {engine.name: engine.devices for engine in contract.engines if pod in engine.pods}
    ranks = {
        f"rank {member.rank_offset + local}": (device,)
        for member in contract.members
        if member.pod == pod
        for local, device in enumerate(member.devices or range(member.gpus))
    }
    return ranks | {f"engine {name}": devices for name, devices in users.items()}


def describe_missing(pod: str, users: Mapping[str, Sequence[int]], present: int) -> str:
    """Return an error message if only devices 0 to `present` - 1 exist and `users` need more; else an empty text."""
    absent = {
        user: missing
        for user, devices in users.items()
        if (missing := [device for device in devices if device >= present])
    }
    if not absent:
        return ""
    wanted = ", ".join(f"{user} on {_numbers(devices)}" for user, devices in absent.items())
    seen = f"only {_numbers(range(present))}" if present else "no CUDA device"
    needed = 1 + max(device for devices in users.values() for device in devices)
    return (
        f"pod {pod} must run {wanted}, but sees {seen}: lower gpus of its group, or give the pod "
        f"{counted(needed, 'whole GPU')} (device.resourceName is the resource that it requests; a process sees at "
        "most one MIG slice); without GPUs, device.type cpu would work"
    )


async def count_devices(environ: Mapping[str, str]) -> int | None:
    """Return the number of CUDA devices that a process with these variables sees.

    Returns None if the driver fails to answer; the ranks will report that.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _COUNT, env=environ, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    error, count = map(int, output.split()) if process.returncode == 0 else (-1, 0)
    if error:
        logger.warning("cannot count CUDA devices: the driver gave error %d", error)
        return None
    return count


def _environ(contract: Contract, pod: str, environ: Mapping[str, str]) -> dict[str, str]:
    # The variables with which the contract's device numbers apply: only ranks on the first devices keep the container's
    # CUDA_VISIBLE_DEVICES.
    renumbered = any(pod in engine.pods for engine in contract.engines) or any(
        member.pod == pod and member.devices not in ((), tuple(range(member.gpus))) for member in contract.members
    )
    return {name: value for name, value in environ.items() if not (renumbered and name == "CUDA_VISIBLE_DEVICES")}


def _numbers(devices: Sequence[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
