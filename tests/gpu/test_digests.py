"""Digests on a GPU: one kernel gives what plain PyTorch does, also beyond 2^31 numbers."""

import pytest
import torch

from grpo_workload.weights import digest
from support.trainer.plain_digest import plain_order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [0, 1, 100, 1024 * 16, 100_003])
def test_the_kernel_gives_what_pytorch_does(dtype, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    order = plain_order(digest.wide(values))
    assert digest.digest(values.cuda(), sums=True).tolist() == [order, *digest.any_order(digest.words(values))]
    assert digest.digest(values.cuda(), sums=False).tolist() == [order, 0, 0]


def test_numbers_far_behind_count_as_others_do():
    many = torch.zeros(2**31 + 2**20, dtype=torch.int8, device="cuda")
    found = []
    for place in (5, 5 + 2**20, 5 + 2**31):
        many[place] = 1
        found.append(digest.digest(many, sums=True).tolist())
        many[place] = 0
    assert len({order for order, _, _ in found}) == 3
    assert [rest for _, *rest in found] == [found[0][1:]] * 3


def test_columns_are_read_as_rows_are():
    values = torch.randn(300, 70, device="cuda", dtype=torch.bfloat16)
    columns = values[:, 10:30]
    assert torch.equal(digest.digest(columns, sums=True), digest.digest(columns.clone(), sums=True))
    assert torch.equal(digest.digest(values.t(), sums=True), digest.digest(values.t().contiguous(), sums=True))
