"""Tries the policy on a few tokens before anything that costs minutes: does it train, and does it compute the right?

Without it, a model that transformers loads and training cannot handle would fail only after vLLM is loaded and a whole
rollout is sampled, or would be trained wrongly. What is right is what transformers computes by itself: each sequence
alone, with its eager attention, in evaluation mode.

Shapes: T completion tokens.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.micro_batch import MicroBatch, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.policy.model import tiles
from grpo_workload.policy.step.policy import Policy

logger = logging.getLogger(__name__)

FIRST, SECOND = 24, 8  # tokens of the two sequences; a state that leaks from the first is largest in a short second
LEAK = 0.5
"""Share of the effect of a preceding sequence by which log-probabilities may differ: rounding, or a router's tie."""
_NOISE = {torch.float32: 1e-4}  # differences of log-probabilities, in nats, that rounding explains
_HALF_NOISE = 0.02
# The device, another rank or the memory failed, not the model.
_NOT_THE_MODEL = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, MemoryError)


def try_policy(policy: Policy, config: TrainerConfig) -> None:
    """Run a forward and a backward pass, and compare log-probabilities in several ways; collective under ZeRO-3 and
    in sequence groups.

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
            together, alone = micro_batch([first, second] if packs else [second]), micro_batch([second])
            if (replay := policy.head.replay) is not None:  # raises if a router cannot be replayed
                _last(policy, replace(alone, experts_NLX=replay.own_choice(alone.num_tokens)))
            own_T, odd = _own(policy, alone, config.model.attention)
            found = _Found(
                trained_T=_train(policy, together),
                again_T=_last(policy, together, training=True),
                packed_T=_last(policy, together),
                alone_T=_last(policy, alone),
                after_T=_last(policy, micro_batch([_sample(ids, FIRST + 1)])),
                shared_T=_last(policy, _shared(ids)) if packs and policy.shares_prompts else None,
                near_T=_last(policy, _before(ids, len(ids) + 1)),
                far_T=_last(policy, _before(ids, _last_place(module.config, config))),
                own_T=own_T,
                odd=odd,
                eager_T=_own(policy, alone, "eager")[0],
            )
        except _NOT_THE_MODEL:
            raise
        except Exception as error:
            # Under ZeRO-3, or in a sequence group, a rank that another one left alone gets a RuntimeError, too.
            if (policy.is_partitioned or policy.group is not None) and type(error) is RuntimeError:
                raise
            raise ConfigError(
                f"{config.model.field}: {config.model.source} cannot be trained: {_describe(error)}"
            ) from error
    found.check(config, _NOISE.get(module.dtype, _HALF_NOISE))


class _Found(NamedTuple):
    """Log-probabilities of the second sequence."""

    trained_T: Tensor  # in training mode, as the next but one
    again_T: Tensor  # the same, with other random numbers
    packed_T: Tensor  # behind the first sequence, in one micro-batch
    alone_T: Tensor
    after_T: Tensor  # as the end of one sequence with the first
    shared_T: Tensor | None  # the same, where another completion has the first in common; None: none ever has
    near_T: Tensor  # the same, before a further token at the next place but one
    far_T: Tensor  # the same, before a further token at the last place that a sequence of the job may have
    own_T: Tensor  # alone, from the logits that the model itself returns
    odd: float  # largest share of those logits that `LogitChange` does not explain
    eager_T: Tensor  # as own_T, with transformers' eager attention

    def check(self, config: TrainerConfig, noise: float) -> None:
        """ConfigError if values that should be equal differ by more than `noise`, in nats."""
        model = config.model
        if not self.packed_T.isfinite().all():
            raise ConfigError(
                f"model.dtype: {model.source} computes log-probabilities that are not finite in {model.dtype}; "
                "bfloat16 or float32 may work"
            )
        leak, most = _difference(self.packed_T, self.alone_T), _difference(self.after_T, self.alone_T)
        logger.info("the trial of the policy: packed sequences differ by %.2g nats from the same alone", leak)
        if leak > max(LEAK * most, noise):
            raise ConfigError(
                f"{model.field}: {model.source} with model.attention {model.attention} mixes sequences that are packed "
                f"into one micro-batch: log-probabilities of a sequence differ by {leak:.2g} nats after another one, "
                f"and by {most:.2g} if the two are joined; training.perDeviceTrainBatchSize 1 would work"
            )
        if self.shared_T is not None and (by := _difference(self.shared_T, self.after_T)) > max(LEAK * most, noise):
            raise ConfigError(
                f"{model.field}: {model.source} with model.attention {model.attention} does not attend to a prompt "
                f"that completions share: log-probabilities differ by {by:.2g} nats from those with a prompt for each, "
                f"and by {most:.2g} from those without one; training.perDeviceTrainBatchSize 1 would work"
            )
        # The same kernels work on the same inputs, but for one place.
        if (by := _difference(self.far_T, self.near_T)) > noise:
            raise ConfigError(
                f"{model.field}: {model.source} computes a token otherwise where a longer sequence is in its "
                f"micro-batch, as engines do not: log-probabilities differ by {by:.2g} nats; a lower "
                "generation.maxModelLen or another model would work"
            )
        # Another kernel rounds differently, in every layer, and half precision rounds large logits by tenths of a nat.
        bound = min(max(LEAK * most, noise), 100 * noise)
        if (by := _difference(self.own_T, self.alone_T)) > bound or self.odd > noise / 2:
            raise ConfigError(
                f"{model.field}: {model.source} changes the logits of its output layer in a way that training does not "
                f"support: log-probabilities differ by {by:.2g} nats, logits by {self.odd:.1%}; use another model"
            )
        if (by := _difference(self.eager_T, self.own_T)) > bound:
            raise ConfigError(
                f"model.attention: {model.attention} does not compute the attention of {model.source}: "
                f"log-probabilities differ by {by:.2g} nats from those with eager; use eager"
            )
        # The mean: the same kernels work on the same inputs, so a router has no reason to choose otherwise.
        by, random = ((self.trained_T - one_T).abs().mean().item() for one_T in (self.packed_T, self.again_T))
        if (by > 5 * noise or random > noise) and (config.lora is None or config.lora.dropout == 0):
            raise ConfigError(
                f"{model.field}: {model.source} computes something else in training than engines sample with, such as "
                f"dropout: log-probabilities differ by {max(by, random):.2g} nats; set it to 0 in the model's "
                "config.json, or use another model"
            )


def _difference(one_T: Tensor, other_T: Tensor) -> float:
    """The median, because a router of experts may choose otherwise for single tokens."""
    return (one_T - other_T).abs().median().item()


def _train(policy: Policy, batch: MicroBatch) -> Tensor:
    """Run a forward and a backward pass, down to the embeddings; returns what `_last` does, in training mode.

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
        with tiles.unreduced(module):
            torch.autograd.grad(logprobs_BT.sum(), embedded)
    finally:
        handle.remove()
        module.eval()
    return logprobs_BT.detach()[-1, : SECOND - 1].cpu()


@torch.no_grad()
def _last(policy: Policy, batch: MicroBatch, *, training: bool = False) -> Tensor:
    """Log-probabilities [T] of the tokens of the batch's last sequence, in host memory."""
    policy.module.train(training)
    rows_BT = policy.head.per_token(policy.module, batch.to(policy.device), 1.0).logprobs_BT
    policy.module.eval()
    return rows_BT[-1, : SECOND - 1].cpu()


@torch.no_grad()
def _own(policy: Policy, batch: MicroBatch, attention: str) -> tuple[Tensor, float]:
    """Log-probabilities [T] of a batch of one sequence, from the logits that the model returns, in host memory.

    And the largest difference of these to what `LogitChange` makes of the output layer's, as a share of the largest.
    """
    usual, plain = policy.module.config._attn_implementation, []
    if policy.head.replay is not None:
        policy.head.replay.use(batch.experts_NLX)

    def capture(_layer: Any, _inputs: Any, output: Tensor) -> None:
        plain.append(output[0].float())

    policy.module.eval()
    policy.module.set_attn_implementation(attention)
    handle = policy.module.get_output_embeddings().register_forward_hook(capture)
    try:
        logits_NV: Tensor = policy.module(**batch.to(policy.device).model_inputs()).logits[0].float()
    finally:
        handle.remove()
        policy.module.set_attn_implementation(usual)
    expected_NV = policy.head.change.apply(plain[-1])
    odd = 1.0
    if expected_NV.shape == logits_NV.shape:
        odd = ((expected_NV - logits_NV).abs().max() / logits_NV.abs().max()).item()
    return logits_NV.log_softmax(dim=1).cpu()[batch.places_K, batch.targets_K], odd


def _before(ids: list[int], place: int) -> MicroBatch:
    """Return one sequence of `ids` and a further token at `place`: as far out as it may be, it costs no more."""
    batch = micro_batch([_sample([*ids, ids[0]], FIRST + 1)])
    batch.position_ids_1N[0, -1] = place
    return batch


def _shared(ids: list[int]) -> MicroBatch:
    """Return two completions of one prompt, which is fed once; the second is the end of `ids`."""
    prompt_tokens = FIRST + 1
    other = _sample([*ids[:prompt_tokens], *ids[: SECOND - 1]], prompt_tokens)
    return micro_batch([other, _sample(ids, prompt_tokens)], (0, prompt_tokens))


def _last_place(model_config: Any, config: TrainerConfig) -> int:
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return max(FIRST + SECOND + 1, (config.generation.max_model_len or context or 0) - 1)


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
