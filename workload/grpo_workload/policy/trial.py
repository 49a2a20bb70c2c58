"""Tries the policy on a few tokens before anything that costs minutes: does it train, and do packed sequences mix?

Without it, a model that transformers loads and training cannot handle would fail only after vLLM is loaded and a whole
rollout is sampled.

Shapes: T completion tokens.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_workload.algorithm.micro_batch import MicroBatch, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.policy.policy import Policy
from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.inputs import ModelConfig
from grpo_workload.spec.trainer import TrainerConfig

logger = logging.getLogger(__name__)

FIRST, SECOND = 24, 8  # tokens of the two sequences; a state that leaks from the first is largest in a short second
LEAK = 0.5
"""Share of the effect of a preceding sequence that packed log-probabilities may show: rounding, or a router's tie."""
_NOISE = {torch.float32: 1e-4}  # differences of log-probabilities, in nats, that rounding explains
_HALF_NOISE = 0.02
# The device, another rank or the memory failed, not the model.
_NOT_THE_MODEL = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, MemoryError)


def try_policy(policy: Policy, config: TrainerConfig) -> None:
    """Run a forward and a backward pass, and compare packed sequences with the same alone; collective under ZeRO-3.

    Weights, gradients, random numbers, the optimizer and DeepSpeed's counters stay as they are.

    Raises:
        ConfigError: the model cannot be trained like this; the message names the field, the cause, and what may work.
    """
    module, packs = policy.module, config.training.per_device_train_batch_size != 1
    vocabulary = module.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (FIRST + SECOND,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second = _sample(ids[:FIRST], 1), _sample(ids[FIRST:], 1)
    with _undisturbed(policy):
        try:
            _train(policy, micro_batch([first, second] if packs else [first]))
            module.eval()
            with torch.no_grad():
                packed, alone, after = (
                    _last(policy, batch)
                    for batch in (
                        micro_batch([first, second] if packs else [second]),
                        micro_batch([second]),
                        micro_batch([_sample(ids, FIRST + 1)]),
                    )
                )
        except _NOT_THE_MODEL:
            raise
        except Exception as error:
            # Under ZeRO-3, a rank that another one left alone gets a RuntimeError, too.
            if policy.is_partitioned and type(error) is RuntimeError:
                raise
            raise ConfigError(
                f"{config.model.field}: {config.model.source} cannot be trained: {_describe(error)}"
            ) from error
    _check(config.model, packed, alone, after, _NOISE.get(module.dtype, _HALF_NOISE))


def _check(config: ModelConfig, packed_T: Tensor, alone_T: Tensor, after_T: Tensor, noise: float) -> None:
    """Compare log-probabilities of the second sequence: packed, alone, and as the end of one with the first."""
    if not packed_T.isfinite().all():
        raise ConfigError(
            f"model.dtype: {config.source} computes log-probabilities that are not finite in {config.dtype}; "
            "bfloat16 or float32 may work"
        )
    # The median, because a router of experts may choose otherwise for single tokens.
    leak, most = ((values_T - alone_T).abs().median().item() for values_T in (packed_T, after_T))
    logger.info("the trial of the policy: packed sequences differ by %.2g nats from the same alone", leak)
    if leak > max(LEAK * most, noise):
        raise ConfigError(
            f"{config.field}: {config.source} with model.attention {config.attention} mixes sequences that are packed "
            f"into one micro-batch: log-probabilities of a sequence differ by {leak:.2g} nats after another one, and "
            f"by {most:.2g} if the two are joined; training.perDeviceTrainBatchSize 1 would work"
        )


def _train(policy: Policy, batch: MicroBatch) -> None:
    """Run a forward and a backward pass, down to the embeddings.

    Not to the weights: their gradients would take as much memory as the weights, and DeepSpeed's hooks would count and
    reduce them.
    """
    module, embedded = policy.module, []

    def capture(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = module.get_input_embeddings().register_forward_hook(capture)
    module.train()
    try:
        logprobs_BT = policy.head.per_token(module, batch.to(policy.device), 1.0).logprobs_BT
        torch.autograd.grad(logprobs_BT.sum(), embedded)
    finally:
        handle.remove()


def _last(policy: Policy, batch: MicroBatch) -> Tensor:
    """Log-probabilities [T] of the tokens of the batch's last sequence, in host memory."""
    rows_BT = policy.head.per_token(policy.module, batch.to(policy.device), 1.0).logprobs_BT
    return rows_BT[-1, : SECOND - 1].cpu()


@contextmanager
def _undisturbed(policy: Policy) -> Iterator[None]:
    module = policy.module
    was_training = module.training
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            module.train(was_training)
    if devices:  # vLLM measures what is free
        torch.cuda.empty_cache()


def _sample(ids: list[int], prompt_tokens: int) -> Sample:
    answer = Completion(
        token_ids=tuple(ids[prompt_tokens:]),
        logprobs=(0.0,) * (len(ids) - prompt_tokens),
        text="",
        finish_reason="stop",
        weight_version=0,
    )
    prompt = Prompt(index=-1, text="", token_ids=tuple(ids[:prompt_tokens]))
    return Sample(prompt=prompt, completion=answer, reward=0.0, advantage=0.0)


def _describe(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    *_, innermost = traceback.extract_tb(error.__traceback__)
    return (
        f"{type(error).__name__}: {error} ({innermost.filename}:{innermost.lineno}); another model.attention "
        "(eager, sdpa) or another model may work"
    )
