"""Checks, before anything loads, that every rank's device computes in the dtype that the model is trained in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from grpo_spec.contract import Device
from grpo_spec.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
"""The values of model.dtype, in the order in which they are suggested."""

_SLOW = (
    "model.dtype: the CPUs of {ranks} have no instructions for {dtype}: matrix products take many times as long as "
    "in float32, which would work"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Dtypes that one rank's device computes in."""

    rank: int
    device: str  # name of the device, for people
    dtypes: tuple[str, ...]  # subset of DTYPES
    slow: tuple[str, ...] = ()  # those of `dtypes` that it has no instructions for


def cuda_dtypes(capability: tuple[int, int], *, bfloat16: bool) -> tuple[str, ...]:
    """Dtypes that a CUDA device of this compute capability has instructions for.

    `bfloat16`: torch says that it is supported, without emulation.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
    """
    has = {"bfloat16": bfloat16 and capability >= (8, 0), "float16": capability >= (5, 3), "float32": True}
    return tuple(dtype for dtype in DTYPES if has[dtype])


def cpu_dtypes() -> tuple[str, ...]:
    """Dtypes that ranks on a CPU train in. Few CPUs have instructions for float16, and DeepSpeed refuses the others."""
    return ("bfloat16", "float32")


def own_support(rank: int, device: Device) -> Support:
    """Dtypes that the device of this rank, its current one, computes in."""
    if device is Device.CPU:
        # torch's own question before it hands a product to oneDNN; without that it multiplies with plain loops.
        slow = () if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("bfloat16",)
        return Support(rank=rank, device="CPU", dtypes=cpu_dtypes(), slow=slow)
    major, minor = torch.cuda.get_device_capability()
    dtypes = cuda_dtypes((major, minor), bfloat16=torch.cuda.is_bf16_supported(including_emulation=False))
    return Support(
        rank=rank, device=f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}", dtypes=dtypes
    )


def check_precision(dtype: str, ranks: Sequence[Support]) -> str | None:
    """Refuse a `model.dtype` that some devices lack. ConfigError names their ranks, and a dtype that all support.

    Returns a warning if some devices are slow in it, else None.
    """
    lacking: dict[str, list[int]] = defaultdict(list)
    for one in ranks:
        if dtype not in one.dtypes:
            lacking[one.device].append(one.rank)
    if not lacking:
        slow = [one.rank for one in ranks if dtype in one.slow]
        return _SLOW.format(dtype=dtype, ranks=_numbers(slow)) if slow else None
    devices = "; ".join(f"{_numbers(numbers)} ({device})" for device, numbers in lacking.items())
    works = next(other for other in DTYPES if all(other in one.dtypes for one in ranks))
    raise ConfigError(f"model.dtype: the devices of some ranks do not support {dtype}: {devices}; {works} would work")


def _numbers(ranks: Sequence[int]) -> str:
    """Name sorted ranks as people write them: `ranks 0-3, 7`."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )
