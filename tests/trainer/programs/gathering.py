"""Three steps under ZeRO-3, each followed by exports of all weights: gathering.py DEVICE.

Each rank reports a list with the names, types and shapes that the exporter announces, and for each step: which
parameters it holds only a part of after the exports, the names, types and shapes that were exported, which values
differ from what DeepSpeed gathers, and which values are still those of the step before.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

device = Device(sys.argv[1])
environment.prepare(device, os.environ)

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from results import report
from torch import nn

from grpo_workload.ranks.collectives import join
from grpo_workload.weights import export
from grpo_workload.weights.export import Export, full

LAYERS, SIZE = 12, 131  # a size that neither 2 nor 3 ranks divide
export.GATHER_BYTES = 5 * SIZE**2  # two weights in bfloat16, and a bias
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
exporter = Export(full(engine.module), is_partitioned=True)
parameters = dict(engine.module.named_parameters())
before: dict[str, torch.Tensor] = {}
steps = []
for _ in range(3):
    engine.backward(engine(torch.randn(4, SIZE, device=engine.device, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    for _ in range(10):
        exported = dict(exporter)  # not copied: memory that was reused too early would show
    partitioned = [name for name, one in parameters.items() if one.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        wrong = [name for name, one in parameters.items() if not torch.equal(exported[name], one.data)]
    untrained = [name for name, value in before.items() if torch.equal(value, exported[name])]
    steps.append(
        {
            "partitioned": partitioned,
            "exported": [[name, str(value.dtype), list(value.shape)] for name, value in exported.items()],
            "wrong": wrong,
            "untrained": untrained,
        }
    )
    before = exported
report({"specs": [[spec.name, str(spec.dtype), list(spec.shape)] for spec in exporter.specs], "steps": steps})
