"""Three steps with optimizer states on the device, and three with the states offloaded to the host between steps. The
second one is skipped, since the loss of one rank is infinite.

states_away.py MODEL DATA OUT PLAN...: a PLAN is STAGE:DTYPE:OPTIMIZER_DTYPE. With the states away, a checkpoint is
saved before the third step, which is then taken twice: directly, and resumed from the checkpoint. Before the first step
with the states away and after resuming, the longest sequence is tried and the size of micro-batches measured. OUT
gets, by plan: these sizes, what a longer sequence than memory holds is told,
metrics, weights and states of all steps, the states' bytes on the device between steps, during steps, and as
capacity.states calculates them, the error of a checkpoint whose weights are broken on the last rank, and the weights
before and after a step that only decays them.
"""

import gc
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from fixed_samples import by_rank, make_policy, resume, samples, take_step, train_on
from results import error_of
from transformers import AutoTokenizer

from grpo_workload.algorithm import token_budget
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.capacity.states import num_parameters, training_footprint
from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.policy.trials.memory_trial import Room, TooLongError, longest_sample, try_memory
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from support.trainer.step_settings import step_settings

token_budget.FIRST = 8  # what a GPU measures takes minutes on a CPU


def make_config(model, plan, offload, **training):
    stage, dtype, optimizer_dtype = plan.split(":")
    parallelism = {"offloadOptimizer": offload, "optimizerDtype": optimizer_dtype}
    return step_settings(model, dtype, stage, training=training, parallelism=parallelism)


def states(policy):
    """Return copies of master weights and moments, wherever they are."""
    return [
        tensor.detach().clone()
        for master, state in adam(policy.deepspeed_engine).state.items()
        for tensor in (master, *state.values())
        if isinstance(tensor, torch.Tensor)
    ]


def bytes_of(tensors):
    """Return the number of bytes of the tensors' storages; a shared storage counts once."""
    return sum(
        {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}.values()
    )


def weights(policy):
    return {name: weight.clone() for name, weight in policy.weights()}


def take_steps(policy, config, steps):
    """Take steps; return their metrics without times, and the weights and states after them."""
    metrics = [take_step(policy, step, config.training) for step in steps]
    return (
        [{name: value for name, value in step.items() if name != "time/offload"} for step in metrics],
        weights(policy),
        states(policy),
    )


def take_broken_step(policy, config):
    """Return the metrics of a step whose loss is infinite on the last rank, and what it changed."""
    before = weights(policy), states(policy)
    metrics = take_step(policy, 7, config.training, broken=True)
    after = weights(policy), states(policy)
    pairs = zip([*before[0].values(), *before[1]], [*after[0].values(), *after[1]], strict=True)
    return metrics["skipped"], metrics["loss"], all(torch.equal(one, other) for one, other in pairs)


def save_broken(policy, checkpoints, tokenizer, state):
    """Break a weight on the last rank; return the error of saving it."""
    weight = next(policy.module.parameters())
    if dist.get_rank() == dist.get_world_size() - 1:
        getattr(weight, "ds_tensor", weight).data.view(-1)[0] = math.nan
    return error_of(checkpoints.save, policy, tokenizer, state)


def sizes(policy, config):
    """Return the states' bytes on the device between steps, during steps, and as capacity.states calculates them."""
    on_device = [away.on_device for away in policy._states._away]
    between = bytes_of(on_device)
    with policy.with_states():
        back = bytes_of(on_device)
    own = num_parameters(policy.module.parameters())
    return between, back, training_footprint(config, num_parameters=own, world_size=2).away


def decay_alone(model, plan):
    """Return the weights before and after a step whose gradients are 0."""
    offload = "cpu" if int(plan[0]) > 1 and plan.endswith("float32") else "none"
    policy = make_policy(config := make_config(model, plan, offload, learningRate=0.1, weightDecay=0.5))
    before = weights(policy)
    owned = [[replace(sample, advantage=0.0) for sample in own] for own in by_rank(list(samples(0)))]
    train_on(policy, owned, config.training)
    return before, weights(policy)


LONGEST = 300, 12  # tokens of the longest sequence, and of its completion


class Growing:
    """A device's memory, of which each pass takes a multiple of the one before; a CPU's is not measured."""

    def __init__(self, *peaks):
        self._peaks = iter(peaks)

    def begin(self):
        return Room(free=2100 + dist.get_rank(), spare=100)

    def peak(self):
        return next(self._peaks)


def choose(policy, halvings):
    """Let the policy measure micro-batches; return their size, and whether random numbers are what they were."""
    before, fed = torch.random.get_rng_state(), []
    handle = policy.module.register_forward_pre_hook(
        lambda _module, _args, inputs: fed.append((inputs["input_ids"].numel(), len(inputs["cu_seq_lens_q"]) - 1)),
        with_kwargs=True,
    )
    choice = try_memory(
        policy,
        Growing(100, 300, 1000, 4000, 2050),
        longest_sample(policy, *LONGEST, None),
        most=60_000,
        fixed=None,
        halvings=halvings,
    )
    handle.remove()
    return *choice, fed, torch.equal(torch.random.get_rng_state(), before), policy.deepspeed_engine.micro_steps


def run_out_of_memory(policy):
    """Let the device's memory end at 200 tokens, and then at none.

    Return what is said of the longest sequence, and its cause; and the errors of steps on four sequences and on one.
    """
    memory = 200

    def end(_module, _args, inputs):
        if inputs["input_ids"].numel() > memory:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    policy.module.register_forward_pre_hook(end, with_kwargs=True)
    sample = longest_sample(policy, *LONGEST, None)
    try:
        try_memory(policy, Growing(100, 300, 1000, 1500), sample, most=100, fixed=None, halvings=0)
    except TooLongError as error:
        refused = error.free, error.needed, error.cause
    memory, errors = 0, []
    for count in (4, 1):
        scale = LossScale(num_sequences=count, num_tokens=9)
        errors.append(error_of(policy.step, [micro_batch(list(samples(0))[:count])], 1, scale))
    return refused, errors


def run(model, data, plan, tokenizer):
    stage = int(plan[0])
    plain = make_policy(config := make_config(model, plan, "none"))
    result = {"plain": [take_steps(plain, config, (0,))], "broken": [take_broken_step(plain, config)]}
    result["plain"] += [take_steps(plain, config, steps) for steps in ((2,), (3,))]

    policy = make_policy(config := make_config(model, plan, "generating"))
    result["chosen"] = [choose(policy, 0)]
    result["away"] = [take_steps(policy, config, (0,))]
    result["broken"].append(take_broken_step(policy, config))
    result["away"].append(take_steps(policy, config, (2,)))
    result["sizes"] = sizes(policy, config)
    checkpoints = Checkpoints(Path(data), plan, keep=1, attempt=0, pod_uid="uid")
    state = SavedState(step=3, weight_version=3, num_tokens=0, world_size=2, zero_stage=stage)
    checkpoints.save(policy, tokenizer, state)
    result["away"].append(take_steps(policy, config, (3,)))

    resumed = make_policy(config)
    resume(resumed, checkpoints, zero_stage=stage)
    result["chosen"].append(choose(resumed, 1))
    result["loaded"] = states(resumed)
    result["resumed"] = take_steps(resumed, config, (3,))
    result["refused"] = save_broken(resumed, checkpoints, tokenizer, replace(state, step=4))
    result["kept"] = sorted(path.name for path in (Path(data) / plan / "checkpoints").iterdir())
    result["too long"], result["too many"] = run_out_of_memory(resumed)
    result["decayed"] = decay_alone(model, plan)
    return result


def main(model, data, out, plans):
    gc.freeze()  # DeepSpeed collects garbage for each bfloat16 optimizer: skip what was imported, for speed
    tokenizer = AutoTokenizer.from_pretrained(model)
    results = {plan: run(model, data, plan, tokenizer) for plan in plans}
    if os.environ["RANK"] == "0":
        torch.save(results, out)


_, model, data, out, *plans = sys.argv
main(model, data, out, plans)
