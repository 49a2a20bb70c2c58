"""The policy under DeepSpeed, set up through accelerate: one optimizer step over micro-batches, and its weights by name.

Shapes: B sequences, T completion tokens, K completion tokens of all sequences.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_scheduler

from grpo_workload import attention, mismatch
from grpo_workload.batching import MicroBatch
from grpo_workload.collectives import join
from grpo_workload.config import ParallelismConfig, TrainerConfig
from grpo_workload.contract import Device
from grpo_workload.launch_config import deepspeed_config
from grpo_workload.logprobs import Scorer
from grpo_workload.loss import LossScale, grpo_loss
from grpo_workload.tally import Tally

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GATHER_BYTES = 2**29  # of parameters that ZeRO-3 holds gathered at a time


class Policy:
    """A causal language model, AdamW and the learning rate's schedule, over all ranks of the world."""

    def __init__(
        self, config: TrainerConfig, device: Device, *, timeout_seconds: int, pad_token_id: int, load_universal: bool = False
    ) -> None:
        """Join the process group and load the model; collective. With `load_universal`, checkpoints are to be loaded in that form.

        Raises:
            ValueError: the model cannot be loaded, or settings do not go together; names the field.
        """
        self._config, self._kind = config, device
        self.is_partitioned = config.parallelism.zero_stage == 3
        ds_config = deepspeed_config(config) | {"zero_force_ds_cpu_optimizer": _uses_deepspeed_adam(config.parallelism, device)}
        ds_config["checkpoint"] = {"load_universal": load_universal}
        self._accelerator = _accelerator(ds_config, config, device, timeout_seconds)
        self.device: torch.device = self._accelerator.device
        model = load_model(config, device)
        model.config.pad_token_id = pad_token_id
        self.scorer = Scorer(model)
        if config.parallelism.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # DeepSpeed casts the whole module, but transformers keeps rotary frequencies in float32 on purpose, and so does vLLM.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.training.learning_rate, weight_decay=config.training.weight_decay, fused=device == Device.CUDA
        )
        schedule = get_scheduler(
            config.training.lr_scheduler_type,
            optimizer,
            num_warmup_steps=config.training.warmup_steps,
            num_training_steps=config.training.max_steps,
        )
        self.engine, _, self.schedule = self._accelerator.prepare(model, optimizer, schedule)
        # One rank has nobody to average with, but would copy its gradients into a buffer of a gigabyte for it.
        self.engine.enable_backward_allreduce = dist.get_world_size() > 1 or config.parallelism.zero_stage > 0
        _restore_buffers(self.module, buffers, self.device)
        self._reference = self._load_reference(ds_config, buffers) if config.training.beta > 0 else None

    @property
    def module(self) -> Any:
        """The transformers model that is trained, as DeepSpeed holds it."""
        return self.engine.module

    def step(self, batches: Iterable[MicroBatch], count: int, scale: LossScale) -> dict[str, float]:
        """Take one optimizer step; collective, with the same number of micro-batches on every rank.

        Args:
            batches: this rank's share of the step, taken one by one: the next is made while the device is at work on one.
            count: of them.
            scale: denominators of the whole step, over all ranks.

        Returns:
            Metrics of the whole step under TRL's names: loss, grad_norm before clipping, learning_rate, means over tokens trained on. In
            float16 also loss_scale, which the gradients were multiplied by, and skipped: 1 when they overflowed and the weights stay.
        """
        self.engine.train()
        tally = Tally()
        learning_rate = self.schedule.get_last_lr()[0]
        with self._reduction():
            for index, batch in enumerate(batches):
                self.engine.set_gradient_accumulation_boundary(index == count - 1)
                self._backward(batch.to(self.device), scale, tally)
        finished = self._finish_step()
        return tally.reduce() | finished | {"learning_rate": learning_rate}

    def _backward(self, batch: MicroBatch, scale: LossScale, tally: Tally) -> None:
        training = self._config.training
        logprobs_BT, entropy_BT = score(self.engine, self.scorer, batch, training.temperature)
        log_ratios_BT = mismatch.log_ratios(logprobs_BT, batch.sampling_logprobs_BC, batch.mask_BC)
        correction = training.importance_sampling_correction
        weights_BT = mismatch.weights(
            log_ratios_BT, correction, training.importance_sampling_clip_min, training.importance_sampling_clip_max
        )
        output = grpo_loss(
            logprobs_BT,
            logprobs_BT.detach() - (log_ratios_BT if correction == "bypass" else 0),
            batch.advantages_B,
            batch.mask_BC,
            scale=scale,
            loss_type=training.loss_type,
            epsilon=training.epsilon,
            epsilon_high=training.epsilon_high,
            beta=training.beta,
            max_completion_length=training.max_completion_length,
            ref_logprobs_BT=self._reference_logprobs(batch),
            entropy_BT=entropy_BT,
            weights_BT=weights_BT,
        )
        # DeepSpeed averages over ranks; the shares of the loss have to be summed.
        self.engine.backward(output.loss * dist.get_world_size())
        tally.add(output, mismatch.tally(log_ratios_BT, weights_BT, batch.mask_BC))

    def _reduction(self) -> AbstractContextManager[None]:
        if not self._config.parallelism.coalesce_grad_reduction:
            return nullcontext()
        context: AbstractContextManager[None] = self.engine.coalesce_grad_reduction()
        return context

    def _finish_step(self) -> dict[str, float]:
        grad_norm = None
        if self._config.parallelism.zero_stage == 0 and not (self.engine.bfloat16_enabled() or self.engine.fp16_enabled()):
            # Here alone DeepSpeed clips without keeping the norm. The gradients are reduced by now; their own type may be bfloat16.
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            grad_norm = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]).norm()
        scale = self.engine.optimizer.loss_scale if self.engine.fp16_enabled() else None
        self.engine.step()
        # Also after a step that was skipped: the rate goes by the number of the step, as `go_to` has it.
        self.schedule.step()
        metrics = {"grad_norm": float(self.engine.get_global_grad_norm() if grad_norm is None else grad_norm)}
        if scale is not None:
            metrics |= {"loss_scale": float(scale), "skipped": float(not self.engine.was_step_applied())}
        return metrics

    def go_to(self, step: int) -> None:
        """Set the schedule to where it is after `step` optimizer steps."""
        self.schedule.scheduler.step(step)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full weights in the training type, tied ones once; collective under ZeRO-3: every rank must take them all.

        Under ZeRO-3 parameters are gathered in buckets of `GATHER_BYTES`: neither one by one nor the whole model at once. A tensor may be
        kept after the next one was taken, since giving a parameter up leaves its gathered storage to whoever holds it.
        """
        with torch.no_grad():
            for bucket in _buckets(list(self.module.named_parameters()), GATHER_BYTES):
                with self._gathered([parameter for _, parameter in bucket]):
                    for name, parameter in bucket:
                        yield name, parameter.data

    def _gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        if not self.is_partitioned:
            return nullcontext()
        context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameters)
        return context

    def _load_reference(self, ds_config: dict[str, Any], buffers: dict[str, Tensor]) -> tuple[Any, Scorer]:
        """A frozen copy of the initial model: plain below ZeRO-3, partitioned over the ranks as the policy is with it."""
        model = load_model(self._config, self._kind).requires_grad_(False).eval()
        scorer = Scorer(model)
        if not self.is_partitioned:
            return model.to(self.device), scorer
        keep = {key: ds_config[key] for key in ("train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16")}
        keep["zero_optimization"] = {"stage": 3}
        reference = deepspeed.initialize(model=model, config=keep)[0]
        reference.eval()
        _restore_buffers(reference.module, buffers, self.device)
        return reference, scorer

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return score(*self._reference, batch, self._config.training.temperature)[0]


def score(model: Any, scorer: Scorer, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [B, T] of the completion tokens of `batch`, 0 at padding.

    Args:
        model: a causal language model, or DeepSpeed's engine around it.
        scorer: its own.
        batch: on the model's device.
        temperature: of the softmax.
    """
    with scorer.scoring(batch.places_K, batch.targets_K, temperature):
        scored_K2 = model(**batch.model_inputs()).logits
    return batch.rows(scored_K2[:, 0]), batch.rows(scored_K2[:, 1].detach())


def load_model(config: TrainerConfig, device: Device) -> Any:
    """The model as transformers loads it; ValueError naming the field when it cannot be found or read."""
    field = "model.name" if config.model.name is not None else "model.path"
    if config.model.path is not None and not Path(config.model.path).is_dir():
        raise ValueError(f"{field}: there is no folder {config.model.path} in the container; is its volume mounted in every trainer pod?")
    attention.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model.source,
            revision=config.model.revision or "main",
            dtype=DTYPES[config.model.dtype],
            attn_implementation=config.model.attention,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{field}: cannot load {config.model.source}: {error}") from error
    attention.check_packable(model.config)
    if config.model.use_liger_kernel and device == Device.CUDA:
        fuse(model)
    return model


def fuse(model: Any) -> None:
    """Put Liger's kernels into the model's layers (arXiv:2410.10989), where there are some for its type and the package is there."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError:
        logger.warning("model.useLigerKernel: liger-kernel is not in the image; layers run unfused, which is slower")
        return
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        logger.warning("model.useLigerKernel: Liger knows no %s; its layers run unfused", model.config.model_type)
        return
    # The loss is ours (`logprobs`): Liger's would replace the model's forward.
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def _uses_deepspeed_adam(parallelism: ParallelismConfig, device: Device) -> bool:
    """Whether accelerate is to replace AdamW by DeepSpeed's for CPUs: it is faster there, but is compiled when it is first used."""
    return parallelism.offload_optimizer == "cpu" and device == Device.CUDA and shutil.which(os.environ.get("CXX", "c++")) is not None


def _accelerator(ds_config: dict[str, Any], config: TrainerConfig, device: Device, timeout_seconds: int) -> Accelerator:
    join(device, timeout_seconds)
    return Accelerator(
        mixed_precision="bf16" if ds_config["bf16"]["enabled"] else "fp16" if ds_config["fp16"]["enabled"] else "no",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config, zero3_init_flag=config.parallelism.zero_stage == 3),
        step_scheduler_with_optimizer=False,
    )


def _restore_buffers(module: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.to(device))


def _buckets(parameters: list[tuple[str, nn.Parameter]], max_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        # A partitioned parameter has no elements of its own; DeepSpeed keeps their number beside it.
        num_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    yield bucket
