"""On a GPU, AdamW with moments in 8 bits is bitsandbytes', in pieces too, and for more than 2**31 elements."""

import time

import pytest
import torch

from grpo_spec.training import TrainingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TRAINING = TrainingConfig(learning_rate=1e-2)


def stepped(make, steps=4):
    random = torch.Generator("cuda").manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(2**20 + 300, generator=random, device="cuda"))
    optimizer = make([weight])
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=random, device="cuda")
        optimizer.step()
    return weight, optimizer.state[weight]


def test_pieces_change_no_bit_and_moments_that_arrive_are_those_that_left(monkeypatch):
    from grpo_workload.policy.step import int8_moments as ours

    theirs, its = stepped(lambda given: ours.AdamW8bit(given, lr=1e-2, weight_decay=0.0))
    for piece in (2**30, 4096):
        monkeypatch.setattr(ours, "PIECE", piece)
        weight, state = stepped(lambda given: ours.Int8Adam(given, TRAINING))
        assert torch.equal(weight, theirs)
        assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)) for name, value in its.items())
        plain = ours.as_plain(state)
        for name, which in ours.PLAIN.items():
            ours._quantize(plain[name], state, which)
        again = ours.as_plain(state)
        assert all((again[name] - plain[name]).norm() <= 0.01 * plain[name].norm() for name in ours.PLAIN)


def test_more_elements_than_32_bits_count_are_all_updated():
    from grpo_workload.policy.step.int8_moments import Int8Adam

    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of a GPU")
    weight = torch.nn.Parameter(torch.zeros(2**31 + 1000, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = Int8Adam([weight], TRAINING)
    optimizer.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    print(f"a step of {weight.numel():,} elements takes {time.perf_counter() - start:.3f} s")
    assert optimizer.state[weight]["state1"].dtype == torch.uint8
    assert weight.min().item() == pytest.approx(-2e-2, rel=0.05)
    assert weight.max().item() == pytest.approx(-2e-2, rel=0.05)
