"""Bytes that a training pass takes on a GPU, from the real model on the meta device: no weights, no GPU, no data.

transformers' model, the project's attention, output layer and loss run on tensors without values, while the storages
that live are counted. What a meta tensor lacks is replaced by something of the same sizes, as it is on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.loss import EntropyCut, LossScale
from grpo_workload.algorithm.micro_batch import MicroBatch, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.capacity.stand_ins import Live, like_a_gpu
from grpo_workload.policy.adapters.lora import add_adapters, output_layers
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.policy.memory import activation_offload
from grpo_workload.policy.model import attention, tiles, vision
from grpo_workload.policy.model.load import empty_model, fuse_norms, keep_own_calls, remove_noise


class Activations(NamedTuple):
    """Bytes at the peak of a forward and backward pass, beside weights and the gradients of micro-batches before."""

    others: int
    logits: int  # made while slices of the logits are computed
    gradients: int  # of the step's first micro-batch, as far as they exist at the peak
    in_host_memory: int = 0  # with parallelism.offloadActivations


def training_model(config: TrainerConfig, made: Any = None) -> Any:
    """Return the model that a rank trains, on the meta device, as `policy.model.load` and `step.policy` make it.

    Args:
        config: the job's settings.
        made: of `empty_model`, which is changed in place; None to make one.
    """
    model = empty_model(config) if made is None else made
    keep_own_calls(model)
    remove_noise(model)
    attention.keep_bounds(model)
    for part in vision.left_out(model).values():
        part.requires_grad_(False)
    if config.model.freeze_vision_tower:
        vision.freeze(model)
    if config.model.use_liger_kernel:
        fuse_norms(model)
    tiles.wrap(model)
    with torch.device("meta"):
        add_adapters(model, config)
    if config.lora is not None:
        for name, parameter in model.named_parameters():  # peft leaves adapters on the meta device in float32
            if "lora_" in name:
                parameter.data = parameter.data.to(model.dtype)
    return set_checkpointing(model.train(), config)


def set_checkpointing(model: Any, config: TrainerConfig) -> Any:
    """Make `model` of `training_model` keep the activations that the job keeps, and return it."""
    tiles.turn(model, on=config.parallelism.gradient_checkpointing)
    if config.parallelism.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    else:
        model.gradient_checkpointing_disable()
    return model


def keeps_gradients(config: TrainerConfig) -> bool:
    """Whether a rank keeps whole gradients until the step ends; otherwise each is reduced as soon as it is there."""
    return config.parallelism.zero_stage < 2 or config.parallelism.coalesce_grad_reduction


def activations(model: Any, config: TrainerConfig, tokens: int, longest: int, *, is_first: bool) -> Activations:
    """Return the bytes of a pass over `tokens` tokens, in sequences of at most `longest`.

    Args:
        model: of `training_model`.
        config: the job's settings.
        tokens: number of tokens of the micro-batch.
        longest: tokens of a sequence.
        is_first: it is the step's first micro-batch, so that no gradients exist when it begins.

    Raises:
        Exception: whatever the model raises on the meta device; then nothing is known of its activations.
    """
    live, parked, keeps = Live(), Parked(), keeps_gradients(config)

    def arrived(parameter: Tensor) -> None:
        if not keeps:  # DeepSpeed copies it into its bucket
            parameter.grad = None
        elif parameter.grad is not None:
            live.count(parameter.grad, "gradients")

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter) if keeps and not is_first else None
    for tensor in (*model.parameters(), *model.buffers(), *(one.grad for one in trained if one.grad is not None)):
        live.count(tensor, "before")
    live.peak = live.now.copy()
    handles = [one.register_post_accumulate_grad_hook(arrived) for one in trained] if is_first or not keeps else []
    offloading = parked.hooks() if config.parallelism.offload_activations else nullcontext()
    try:
        with like_a_gpu(model, liger=config.model.use_liger_kernel, live=live), live:
            training_pass(model, config, batch_of(tokens, longest, "meta"), offloading)
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    peak = live.peak
    return Activations(peak["others"] + parked.in_flight, peak["logits"], peak["gradients"], parked.size)


def training_pass(model: Any, config: TrainerConfig, batch: MicroBatch, offloading: Any) -> None:
    """Run forward pass, loss and backward pass as `policy.step.policy` does; `offloading` is entered for the first."""
    training = config.training.model_copy(update={"loss": None})
    head = LogprobHead(
        model, output_layers(model) if config.lora else None, trains_entropy=config.training.entropy_coef > 0
    )
    with offloading:
        model_output = head.per_token(model, batch, training.temperature, Truncation.of(training))
    cut = EntropyCut(threshold=0.0, num_tokens=1) if training.top_entropy_quantile < 1 else None
    output, _ = batch_loss(
        model_output,
        batch,
        training,
        scale=LossScale(num_sequences=batch.num_sequences, num_tokens=batch.num_tokens, entropy_cut=cut),
        ref_logprobs_BT=model_output.logprobs_BT.detach() if training.kl_coef > 0 else None,
    )
    torch.autograd.backward(output.loss)


def batch_of(tokens: int, longest: int, device: str) -> MicroBatch:
    """Make a micro-batch of sequences of `longest` tokens, with one of prompt; the last sequence is shorter."""
    sizes = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    return micro_batch([_sample(max(2, size)) for size in sizes]).to(torch.device(device))


def _sample(length: int) -> Sample:
    answer = Completion(
        token_ids=(1,) * (length - 1),
        logprobs=(-1.0,) * (length - 1),
        text="",
        finish_reason="stop",
        weight_version=0,
    )
    return Sample(prompt=Prompt(index=0, text="", token_ids=(1,)), completion=answer, reward=1.0, advantage=0.5)


class Parked:
    """Saved tensors that `policy.memory.activation_offload` would move to host memory: here they are dropped."""

    def __init__(self) -> None:
        self.size, self._largest = 0, 0

    @property
    def in_flight(self) -> int:
        """Bytes of those that are on their way, and so on the GPU."""
        return self._largest * (activation_offload.IN_FLIGHT + activation_offload.AHEAD)

    def hooks(self) -> Any:
        """Return hooks for the tensors that a forward pass saves."""
        return torch.autograd.graph.saved_tensors_hooks(self._park, self._fetch)

    def _park(self, tensor: Tensor) -> Tensor | tuple[torch.Size, torch.dtype]:
        if not activation_offload._is_worthwhile(tensor):
            return tensor
        self.size, self._largest = self.size + tensor.nbytes, max(self._largest, tensor.nbytes)
        return tensor.shape, tensor.dtype

    @staticmethod
    def _fetch(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else torch.empty(saved[0], dtype=saved[1], device="meta")
