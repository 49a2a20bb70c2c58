"""What ranks under ZeRO-3 export after each step is what DeepSpeed gathers, and they hold parts as before: gathering.py DEVICE."""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys

from grpo_workload import environment
from grpo_workload.contract import Device

device = Device(sys.argv[1])
environment.prepare(device, os.environ)

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from grpo_workload import exports
from grpo_workload.collectives import join
from grpo_workload.exports import Export, full

LAYERS, SIZE = 12, 131  # which neither 2 nor 3 ranks divide
exports.GATHER_BYTES = 5 * SIZE**2  # two of bfloat16, and a bias
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": SIZE},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}

join(device, 300)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=CONFIG)[0]
export = Export(full(engine.module), is_partitioned=True)
parameters = dict(engine.module.named_parameters())
before = None
for _ in range(3):
    engine.backward(engine(torch.randn(4, SIZE, device=engine.device, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    for _ in range(10):
        kept = dict(export)  # not copied: memory that was used again too early would show
    is_cut = [parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE for parameter in parameters.values()]
    assert is_cut == [True, False] * LAYERS, is_cut
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        for name, parameter in parameters.items():
            assert torch.equal(kept[name], parameter.data), name
    assert [(name, value.dtype, tuple(value.shape)) for name, value in kept.items()] == export.specs
    assert before is None or not any(torch.equal(before[name], value) for name, value in kept.items()), "nothing was trained"
    before = kept
