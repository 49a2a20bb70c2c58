"""Steps with AdamW's moments in 8 bits, beside those in float32 and beside bitsandbytes alone.

int8_steps.py MODEL PLAN...: a PLAN is STAGE:DTYPE, or STAGE:DTYPE:lora. Each rank reports by plan: the losses with
moments in float32 and in 8 bits, whether each step moved this rank's weights as a plain bitsandbytes optimizer does
with the same gradients, and the types of the moments.
"""

# ruff: noqa: E402  # what is hidden from ranks has to be shown before the imports

import sys

from grpo_workload.ranks import environment

environment.show("bitsandbytes")

import torch
from bitsandbytes.optim.adamw import AdamW8bit
from fixed_samples import make_policy, take_step
from results import report

from grpo_workload.policy.memory.optimizer_offload import adam
from support.trainer.step_settings import step_settings

STEPS = (0, 2, 3, 0, 2, 3)  # of `fixed_samples`: by the correction's weights, the loss changes from time to time


def configured(model, plan, optimizer_dtype):
    stage, dtype, *lora = plan.split(":")
    return step_settings(
        model,
        dtype,
        stage,
        training={"importanceSamplingCorrection": "token_truncate"},
        parallelism={"optimizerDtype": optimizer_dtype},
        lora={"r": 16} if lora else None,
    )


class Beside:
    """A plain bitsandbytes optimizer for each tensor, which takes the steps of the policy's with the same gradients."""

    def __init__(self, policy):
        self._plain = {}
        self.equal = []
        optimizer = adam(policy.deepspeed_engine)
        optimizer.register_step_pre_hook(self._copy)
        optimizer.register_step_post_hook(self._compare)

    def _copy(self, optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in (one for one in group["params"] if one.grad is not None):
                if tensor not in self._plain:
                    copy = torch.nn.Parameter(tensor.detach().clone())
                    settings = {name: group[name] for name in ("betas", "eps")}
                    self._plain[tensor] = copy, AdamW8bit([copy], weight_decay=0.0, **settings)
                copy, plain = self._plain[tensor]
                copy.data.copy_(tensor.data)
                copy.grad, plain.param_groups[0]["lr"] = tensor.grad.clone(), group["lr"]

    def _compare(self, optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in (one for one in group["params"] if one.grad is not None):
                copy, plain = self._plain[tensor]
                before = copy.detach().clone()
                plain.step()
                ours, theirs = optimizer.state[tensor], plain.state[copy]
                moments = all(torch.equal(ours[name], theirs[name]) for name in ("state1", "state2"))
                self.equal.append(moments and torch.equal(tensor, copy) and not torch.equal(before, copy))


def losses(policy, config):
    return [take_step(policy, step, config.training)["loss"] for step in STEPS]


def run(model, plan):
    whole = make_policy(config := configured(model, plan, "float32"))
    result = {"float32": losses(whole, config)}
    policy = make_policy(config := configured(model, plan, "int8"))
    beside = Beside(policy)
    result |= {"int8": losses(policy, config), "equal": beside.equal}
    states = adam(policy.deepspeed_engine).state.items()
    result["types"] = sorted({f"{tensor.dtype} {state['state1'].dtype}" for tensor, state in states})
    return result


_, model, *plans = sys.argv
report({plan: run(model, plan) for plan in plans})
