"""The policy under DeepSpeed, set up through accelerate: one optimizer step over micro-batches, and its weights by name.

Shapes: B sequences, T completion tokens, K completion tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn
from transformers import get_scheduler

from grpo_workload import mismatch
from grpo_workload.activations import Activations
from grpo_workload.batching import MicroBatch
from grpo_workload.collectives import join
from grpo_workload.config import TrainerConfig
from grpo_workload.contract import Device
from grpo_workload.exports import Export, full
from grpo_workload.launch_config import clips_itself, deepspeed_config, mixed_precision
from grpo_workload.logprobs import Scorer
from grpo_workload.loss import LossScale, grpo_loss
from grpo_workload.model import load_model
from grpo_workload.optimizer import OptimizerStates, forget_steps, uses_deepspeed_adam
from grpo_workload.tally import Tally

if TYPE_CHECKING:
    from grpo_workload.lora import Adapters


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
        ds_config = deepspeed_config(config) | {"zero_force_ds_cpu_optimizer": uses_deepspeed_adam(config.parallelism, device)}
        ds_config["checkpoint"] = {"load_universal": load_universal}
        self._accelerator = _accelerator(ds_config, config, device, timeout_seconds)
        self.device: torch.device = self._accelerator.device
        model = load_model(config, device)
        model.config.pad_token_id = pad_token_id
        self.adapters: Adapters | None = None
        heads = None
        if config.lora is not None:
            from grpo_workload.lora import Adapters, output_layers  # peft takes seconds to import

            self.adapters = Adapters(model, config.lora, revision=config.model.revision, seed=config.training.seed)
            heads = output_layers(model)
        self.scorer = Scorer(model, heads)
        if config.parallelism.gradient_checkpointing:
            # Layers without dropout draw nothing: keeping the generators' states for each of them would only cost.
            has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": has_dropout})
        # DeepSpeed casts the whole module, but transformers keeps rotary frequencies in float32 on purpose, and so does vLLM.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        optimizer = torch.optim.AdamW(
            self.adapters.trained() if self.adapters else model.parameters(),
            lr=config.training.learning_rate,
            weight_decay=config.training.weight_decay,
            fused=device == Device.CUDA,
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
        forget_steps(self.engine)
        self._states = OptimizerStates(self.engine) if config.parallelism.offload_optimizer == "generating" else None
        _restore_buffers(self.module, buffers, self.device)
        self._activations = Activations(self.device) if config.parallelism.offload_activations else None
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
            With states that are offloaded while others generate, time/offload: the seconds that this rank took to move them.
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
        # Before the policy's forward pass, whose hooks wait for its own backward pass: the reference may be the same modules.
        ref_logprobs_BT = self._reference_logprobs(batch)
        with self._activations.offloaded() if self._activations else nullcontext():
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
            ref_logprobs_BT=ref_logprobs_BT,
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
        grad_norm = self._clip() if clips_itself(self._config) else None
        scale = self.engine.optimizer.loss_scale if self.engine.fp16_enabled() else None
        with self.with_states():
            self.engine.step()
        # Also after a step that was skipped: the rate goes by the number of the step, as `go_to` has it.
        self.schedule.step()
        metrics = {"grad_norm": float(self.engine.get_global_grad_norm() if grad_norm is None else grad_norm)}
        if scale is not None:
            metrics |= {"loss_scale": float(scale), "skipped": float(not self.engine.was_step_applied())}
        if self._states is not None:
            metrics["time/offload"] = self._states.seconds
        return metrics

    def with_states(self) -> AbstractContextManager[None]:
        """Within it, optimizer states are where the optimizer updates them."""
        return self._states.on_device() if self._states else nullcontext()

    def _clip(self) -> float:
        """Scale gradients down to maxGradNorm, where they are longer together; their length before."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        # In float32, whatever their own type; read back, since all wait for the end of the step anyway.
        norm = float(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm())
        limit = self._config.training.max_grad_norm
        if 0 < limit < norm:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def go_to(self, step: int) -> None:
        """Set the schedule to where it is after `step` optimizer steps."""
        self.schedule.scheduler.step(step)

    def weights(self) -> Export:
        """What engines get, in the training type: names and full weights, tied ones once, or adapters."""
        return Export(self.adapters.pushed() if self.adapters else full(self.module), is_partitioned=self.is_partitioned)

    def saved_weights(self) -> Export:
        """What `save_pretrained` takes: all weights, or those of adapters."""
        return Export(self.adapters.saved() if self.adapters else full(self.module), is_partitioned=self.is_partitioned)

    def save_pretrained(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write a folder for from_pretrained: transformers' or, with adapters, peft's."""
        if self.adapters is not None:
            self.adapters.save(folder, weights)
        else:
            self.module.save_pretrained(folder, state_dict=weights)

    def _load_reference(self, ds_config: dict[str, Any], buffers: dict[str, Tensor]) -> tuple[Any, Scorer]:
        """The initial model: the policy itself where it has adapters, else a frozen copy, partitioned over the ranks under ZeRO-3."""
        if self.adapters is not None:
            return self.module, self.scorer
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
        with self.adapters.disabled() if self.adapters else nullcontext():
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


def _accelerator(ds_config: dict[str, Any], config: TrainerConfig, device: Device, timeout_seconds: int) -> Accelerator:
    join(device, timeout_seconds)
    return Accelerator(
        mixed_precision=mixed_precision(config),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config, zero3_init_flag=config.parallelism.zero_stage == 3),
        step_scheduler_with_optimizer=False,
    )


def _restore_buffers(module: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.to(device))
