"""Samples with a colocated vLLM, and prints how far the trainer is from it, with and without router replay.

router_replay.py MODEL DEVICE DTYPE; the result is sampling/kl and the largest difference of log-probabilities. On a CPU
vLLM 0.32 does not return the experts that it chose, so there its routers are asked for them.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys
from dataclasses import replace
from functools import partial

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

model, device, dtype = sys.argv[1], Device(sys.argv[2]), sys.argv[3]
environment.prepare(device, os.environ)

import numpy as np
import torch
from fixed_samples import make_policy
from results import report
from sampled_ahead import samples_of

from grpo_workload.algorithm import mismatch
from grpo_workload.algorithm.micro_batch import MicroBatch, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.colocate import ColocateGenerator
from grpo_workload.policy.model.router_replay import check_routed
from grpo_workload.policy.trials.trial import try_policy
from support.trainer.step_settings import bare_settings

PROMPTS, PROMPT_TOKENS = 8, 24
config = bare_settings(
    model,
    dtype,
    training={"routerReplay": True, "maxCompletionLength": 32},
    parallelism={"zeroStage": 2, "gradientCheckpointing": True},
    generation={
        "maxModelLen": 256,
        "kvCacheMemory": "1Gi" if device == Device.CUDA else "64Mi",
        "engineArgs": {"enforce_eager": True},
    },
)


def sample_on_cpu(engine: ColocateGenerator, prompt: Prompt) -> Completion:
    """Sample one completion alone: each step of the engine then adds its tokens' experts, in order."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    asked: dict[int, list[torch.Tensor]] = {}

    def listen(worker: object) -> None:
        for module in worker.get_model().modules():  # type: ignore[attr-defined]
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(keep, module.layer_id))

    def keep(layer: int, experts_NX: torch.Tensor) -> None:
        asked.setdefault(layer, []).append(experts_NX.clone())

    engine._llm.collective_rpc(listen)
    ((completion,),) = engine.generate([prompt], 1)
    experts_NLX = torch.stack([torch.cat(asked[layer]) for layer in sorted(asked)], dim=1)
    return replace(completion, routed_experts=experts_NLX.numpy().astype(np.uint8))


def distance(batch: MicroBatch) -> dict[str, float]:
    """Metrics as a step would have them."""
    ratios_BT = mismatch.log_ratios(policy.logprobs(batch).cpu(), batch.sampling_logprobs_BC, batch.mask_BC)
    found = mismatch.describe(*mismatch.tally(ratios_BT, None, batch.mask_BC), batch.mask_BC.sum().item())
    names = {"kl": "trained/sampling/kl", "max": "trained/sampling/sampling_logp_difference/max"}
    return {short: found[name] for short, name in names.items()}


policy = make_policy(config, device)
try_policy(policy, config)
told = config.training.model_copy(update={"router_replay": device == Device.CUDA})
generator = ColocateGenerator(config.model_copy(update={"training": told}), device)
generator.sync_weights(policy.weights(), 0)
vocabulary, random = policy.module.config.vocab_size, np.random.default_rng(0)
prompts = [
    Prompt(index=place, text="", token_ids=tuple(random.integers(3, vocabulary, PROMPT_TOKENS).tolist()), seed=place)
    for place in range(PROMPTS)
]
if device == Device.CUDA:
    completions = [completion for (completion,) in generator.generate(prompts, 1)]
else:
    completions = [sample_on_cpu(generator, prompt) for prompt in prompts]
for prompt, completion in zip(prompts, completions, strict=True):
    check_routed(prompt, completion)
generator.sleep()
batch = micro_batch(samples_of(prompts, [[completion] for completion in completions]))
report({"replayed": distance(batch), "own": distance(replace(batch, experts_NLX=None))})
generator.close()
