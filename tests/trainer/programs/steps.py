"""Two optimizer steps on fixed samples under each ZeRO stage: steps.py MODEL OUT MICRO_BATCH_SIZE BETA STAGE...

With a BETA over 0, the other terms of the loss have a weight, too: of the entropy, over tokens of high entropy. Tokens
that came before have penalties. Rank 0 also saves the KL divergences of completions before and after the two steps.

A STAGE with a + reduces gradients once a step; one with a b trains in bfloat16; one with a c keeps optimizer states on
the CPU. Rank 0 saves, by stage, the metrics, the weights, and the number of steps that AdamW has counted; for stage 0
also what `plain_steps` yields. Then come a step whose loss is infinite on the last rank, of which it saves whether it
was skipped, one more with its metrics, and four on one generation.
"""

import os
import sys

import torch
from fixed_samples import divergences_of, make_policy, samples, shares_prompts, take_generation, take_step
from plain_steps import plain_steps

from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.policy.trials.trial import try_policy
from support.trainer.step_settings import bare_settings


def main(model, out, micro_batch_size, beta, stages):
    results = {}
    for name in stages:
        stage, coalesce = int(name[0]), name.endswith("+")
        config = bare_settings(
            model,
            "bfloat16" if name.endswith("b") else "float32",
            training={
                "perDeviceTrainBatchSize": micro_batch_size,
                "learningRate": 1e-3,
                "maxSteps": 10,
                "adamBeta1": 0.8,
                "adamBeta2": 0.95,
                "adamEpsilon": 1e-4,
                "weightDecay": 1.0,
                "temperature": 0.7,
                "maxGradNorm": 0.5,
                "beta": beta,
                "entropyCoef": beta,
                "repetitionPenalty": 1 + beta,
                "frequencyPenalty": beta,
                "topEntropyQuantile": 0.6 if beta else 1,
                "importanceSamplingCorrection": "none",
            },
            parallelism={
                "zeroStage": stage,
                "gradientCheckpointing": stage == 2,
                "coalesceGradReduction": coalesce,
                "offloadOptimizer": "cpu" if name.endswith("c") else "none",
            },
        )
        policy = make_policy(config)
        if int(os.environ["WORLD_SIZE"]) > 1:  # a step does not depend on whether the policy was tried before
            try_policy(policy, config)
            assert policy.deepspeed_engine.micro_steps == 0
        kls = [divergences_of(policy, config.training)] if beta else []
        metrics = [take_step(policy, step, config.training) for step in range(2)]
        kls += [divergences_of(policy, config.training)] if beta else []
        steps = {float(state["step"]) for state in adam(policy.deepspeed_engine).state.values() if "step" in state}
        # Weights that rounding moved would change which tokens the quantile keeps: a random model hesitates equally.
        every_token = config.training.model_copy(update={"top_entropy_quantile": 1.0})
        policy._config = policy.passes.config = config.model_copy(update={"training": every_token})
        results[name] = {
            "metrics": metrics,
            "shares prompts": [shares_prompts(policy, step, config.training) for step in range(3)],
            "plain": list(plain_steps(config, map(list, map(samples, range(2))), "cpu")) if name == "0" else None,
            "kls": kls,
            "weights": {name: weight.clone() for name, weight in policy.weights()},
            "steps": steps,
            "skipped": take_step(policy, 2, config.training, broken=True)["skipped"],
            "after": take_step(policy, 2, config.training),
            "generation": take_generation(policy, config),
        }
    if os.environ["RANK"] == "0":
        torch.save(results, out)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
