"""Dtypes that devices support, and the error that names the ranks whose device lacks one."""

from dataclasses import replace

import pytest

from grpo_spec.contract import Device
from grpo_workload.policy.model.dtype_support import Support, check_precision, cpu_dtypes, cuda_dtypes, own_support

V100 = cuda_dtypes((7, 0), bfloat16=False)
H200 = cuda_dtypes((9, 0), bfloat16=True)


def world(*devices):
    return [Support(rank=rank, device=name, dtypes=dtypes) for rank, (name, dtypes) in enumerate(devices)]


@pytest.mark.parametrize(
    ("capability", "bfloat16", "dtypes"),
    [
        ((9, 0), True, ("bfloat16", "float16", "float32")),
        ((8, 0), True, ("bfloat16", "float16", "float32")),
        ((7, 5), True, ("float16", "float32")),  # a build of torch that counts emulation as support
        ((8, 6), False, ("float16", "float32")),  # a build of torch without it
        ((5, 2), False, ("float32",)),
    ],
)
def test_dtypes_follow_the_compute_capability(capability, bfloat16, dtypes):
    assert cuda_dtypes(capability, bfloat16=bfloat16) == dtypes


def test_ranks_with_old_gpus_are_named_with_a_dtype_that_works_on_all():
    ranks = world(("H200", H200), ("V100", V100), ("V100", V100), ("V100", V100), ("H200", H200), ("V100", V100))
    with pytest.raises(
        ValueError, match=r"^model.dtype: .* do not support bfloat16: ranks 1-3, 5 \(V100\); float16 would work$"
    ):
        check_precision("bfloat16", ranks)
    check_precision("float16", ranks)
    check_precision("float32", ranks)
    check_precision("bfloat16", world(("H200", H200)))


def test_kinds_of_devices_are_listed_apart_and_the_suggestion_works_on_every_rank():
    ranks = world(("M40", cuda_dtypes((5, 2), bfloat16=False)), ("V100", V100), ("H200", H200))
    with pytest.raises(ValueError, match=r"rank 0 \(M40\); rank 1 \(V100\); float32 would work"):
        check_precision("bfloat16", ranks)


def test_cpus_train_in_bfloat16_and_not_in_float16():
    assert cpu_dtypes() == own_support(3, Device.CPU).dtypes
    check_precision("bfloat16", [own_support(0, Device.CPU)])
    slow = replace(own_support(1, Device.CPU), slow=("bfloat16",))
    assert check_precision("float32", [slow]) is None
    assert "the CPUs of rank 1 have no instructions for bfloat16: " in (check_precision("bfloat16", [slow]) or "")
    with pytest.raises(ValueError, match=r"float16: rank 0 \(CPU\); bfloat16 would work"):
        check_precision("float16", [own_support(0, Device.CPU)])
