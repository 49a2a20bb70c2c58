"""Eight steps in float16 whose first gradients overflow, a checkpoint, and two more steps with and without a restart.
Then two steps with an infinite loss, at the smallest loss scale.

half.py MODEL DATA STAGE[+]...: a stage with a + reduces gradients once a step. Each rank reports the metrics of all
steps, by stage, and whether a step has moved the weights.

DeepSpeed refuses float16 on a CPU without instructions for it. torch can compute in it anyway, slowly, and the loss
scaling under test is DeepSpeed's own.
"""

import sys
from dataclasses import replace
from pathlib import Path

import fixed_samples
from deepspeed.accelerator import get_accelerator
from results import report
from transformers import AutoTokenizer

from grpo_workload.algorithm.micro_batch import filler
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from support.trainer.step_settings import step_settings

get_accelerator().is_fp16_supported = lambda: True
samples = fixed_samples.samples
# Such large advantages make gradients overflow, as clipping comes later: the loss scale has to fall from 65536.
fixed_samples.samples = lambda step: (replace(sample, advantage=sample.advantage * 20) for sample in samples(step))


def make_config(model, name):
    training = {"perDeviceTrainBatchSize": 2, "maxSteps": 20}
    parallelism = {"coalesceGradReduction": name.endswith("+")}
    return step_settings(model, "float16", name[0], training=training, parallelism=parallelism)


def checksum(policy):
    return sum(weight.double().abs().sum().item() for _, weight in policy.weights())


def take_steps(policy, config, steps, **options):
    for step in steps:
        before = checksum(policy)
        metrics = fixed_samples.take_step(policy, step, config.training, **options)
        yield metrics | {"moved": checksum(policy) != before}


def main(model, data, names):
    results = {}
    for name in names:
        config = make_config(model, name)
        policy = fixed_samples.make_policy(config)
        steps = list(take_steps(policy, config, range(8)))
        checkpoints = Checkpoints(Path(data), f"stage-{name[0]}", keep=1, attempt=0, pod_uid="uid")
        state = SavedState(step=8, weight_version=8, num_tokens=0, world_size=2, zero_stage=int(name[0]))
        checkpoints.save(policy, AutoTokenizer.from_pretrained(model), state)
        straight = list(take_steps(policy, config, [8, 9]))
        resumed = fixed_samples.make_policy(config)
        fixed_samples.resume(resumed, checkpoints, zero_stage=int(name[0]))
        resumed.rehearse([filler(), filler()], 2)  # leaves the loss scale as it was
        results[name] = {"steps": steps, "straight": straight, "resumed": list(take_steps(resumed, config, [8, 9]))}
        resumed.deepspeed_engine.optimizer.loss_scaler.cur_scale = 1.0
        results[name]["broken"] = list(take_steps(resumed, config, [10, 11], broken=True))
    report(results)


_, model, data, *names = sys.argv
main(model, data, names)
