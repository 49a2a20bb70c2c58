"""The policy under DeepSpeed, set up by accelerate: one optimizer step over micro-batches, and its weights by name.

Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn
from transformers import get_scheduler

from grpo_spec.contract import Device
from grpo_spec.deepspeed_config import deepspeed_config, mixed_precision, trainer_clips
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.loss import EntropyCut, LossScale
from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.adapters.adapter_weights import merged
from grpo_workload.policy.adapters.lora import add_adapters, output_layers
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.policy.loss.entropy_cut import find_cut, of_all_ranks
from grpo_workload.policy.loss.own_loss import OwnLoss
from grpo_workload.policy.memory.activation_offload import Activations
from grpo_workload.policy.memory.memory_error import explained_memory
from grpo_workload.policy.memory.optimizer_offload import OptimizerStates, reset_step_counts, uses_deepspeed_adam
from grpo_workload.policy.model.checkpoint_names import CheckpointNames, save_config
from grpo_workload.policy.model.load import load_model, restore_buffers
from grpo_workload.policy.model.router_replay import RouterReplay
from grpo_workload.policy.model.sharing import why_apart
from grpo_workload.policy.step.finite import clip_or_drop, poisoned
from grpo_workload.policy.step.optimizer import make_optimizer
from grpo_workload.policy.step.reference import Reference, frozen_copy
from grpo_workload.policy.step.rehearsal import undisturbed
from grpo_workload.policy.step.step_sums import StepSums
from grpo_workload.policy.step.weight_decay import decay_weights
from grpo_workload.ranks.collectives import join
from grpo_workload.ranks.sequence_group import join_group
from grpo_workload.weights.export import Export, full

logger = logging.getLogger(__name__)


class Policy:
    """The model that is trained, with AdamW and the learning rate's schedule, over all ranks."""

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        *,
        timeout_seconds: int,
        pad_token_id: int,
        load_universal: bool = False,
        reference: Path | None = None,
    ) -> None:
        """Join the process group and load the model; collective.

        Args:
            config: the job's configuration.
            device: kind of device of this rank.
            timeout_seconds: deadline of collectives.
            pad_token_id: id of the tokenizer's padding token.
            load_universal: checkpoints will be loaded in DeepSpeed's universal form.
            reference: a checkpoint's reference model, in place of the initial model.

        Raises:
            ValueError: the model cannot be loaded, or settings contradict each other; the message names the field.
        """
        self._config = config
        self._own_loss = OwnLoss(config.training) if config.training.loss else None
        self.is_partitioned = config.parallelism.zero_stage == 3
        ds_config = deepspeed_config(config) | {
            "zero_force_ds_cpu_optimizer": uses_deepspeed_adam(config.parallelism, device)
        }
        ds_config["checkpoint"] = {"load_universal": load_universal}
        self._accelerator = _accelerator(ds_config, config, device, timeout_seconds)
        self.device: torch.device = self._accelerator.device
        self.group = join_group(config.parallelism.sequence, timeout_seconds)
        in_4_bits = config.lora if config.lora is not None and config.lora.load_in_4bit else None
        if in_4_bits is None:
            model = load_model(config, self.device)
        else:
            from grpo_workload.policy.adapters import four_bit  # late: see `environment.show`

            model = load_model(config, self.device, later=lambda empty: four_bit.weights(empty, in_4_bits))
            four_bit.quantize(model, in_4_bits, self.device)
        model.config.pad_token_id = pad_token_id
        self._names = CheckpointNames(model)
        replay = RouterReplay(model) if config.training.router_replay else None
        reason = why_apart(config, model.config)
        self.shares_prompts = reason is None
        if reason is not None and dist.get_rank() == 0:
            logger.info("prompts are forwarded once for each of their completions: %s", reason)
        self.adapters = add_adapters(model, config)
        layers = output_layers(model) if self.adapters else None
        trains_entropy = config.training.entropy_coef > 0 or (self._own_loss is not None and self._own_loss.has_entropy)
        self.head = LogprobHead(model, layers, trains_entropy=trains_entropy, replay=replay, group=self.group)
        if config.parallelism.gradient_checkpointing:
            # Layers without dropout draw no random numbers: storing the generators' states for each would be a waste.
            has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": has_dropout})
        # DeepSpeed casts the whole module, but transformers and vLLM keep rotary frequencies in float32 on purpose.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        optimizer = make_optimizer(
            [parameter for parameter in model.parameters() if parameter.requires_grad], config, device
        )
        schedule = get_scheduler(
            config.training.lr_scheduler_type,
            optimizer,
            num_warmup_steps=config.training.warmup_steps,
            num_training_steps=config.training.max_steps,
            scheduler_specific_kwargs=dict(config.training.lr_scheduler_kwargs),
        )
        self.deepspeed_engine, _, self.schedule = self._accelerator.prepare(model, optimizer, schedule)
        # A single rank has no other to average with, but would still copy its gradients into a buffer of a gigabyte.
        self.deepspeed_engine.enable_backward_allreduce = dist.get_world_size() > 1 or config.parallelism.zero_stage > 0
        reset_step_counts(self.deepspeed_engine)
        if config.training.weight_decay > 0:
            decay_weights(self.deepspeed_engine.optimizer, self.module, config.training.weight_decay)
        if self.deepspeed_engine.fp16_enabled():
            # At the smallest loss scale DeepSpeed would raise; skipped steps in a row are counted here for all dtypes.
            self.deepspeed_engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        offloads_states = config.parallelism.offload_optimizer == "generating"
        self._states = OptimizerStates(self.deepspeed_engine) if offloads_states else None
        restore_buffers(self.module, buffers, self.device)
        self._activations = Activations(self.device) if config.parallelism.offload_activations else None
        self._reference: Reference | None = None
        if config.training.beta > 0:
            self._reference = (
                Reference(self.module, self.head, self.adapters, is_partitioned=self.is_partitioned, group=self.group)
                if self.adapters
                else frozen_copy(
                    config, self.device, ds_config=ds_config, buffers=buffers, folder=reference, group=self.group
                )
            )

    @property
    def module(self) -> Any:
        """The transformers model that is trained, inside DeepSpeed's engine."""
        return self.deepspeed_engine.module

    def step(self, batches: Iterable[MicroBatch], count: int, scale: LossScale) -> dict[str, float]:
        """Take one optimizer step; collective, with the same number of micro-batches on every rank.

        Args:
            batches: this rank's micro-batches, taken one by one: the next is made while the device works on the last.
                The same for all ranks of a sequence group.
            count: number of micro-batches.
            scale: denominators of the whole step, over all ranks.

        Returns:
            Metrics of the whole step: loss, grad_norm (before clipping), learning_rate, `loss.token_means` and
            `mismatch.describe`. skipped is 1 if the loss or the gradients were not finite on any rank: then weights and
            optimizer states changed on none. In float16 also loss_scale, by which gradients were multiplied. With
            states that are offloaded during generation, time/offload: the seconds that this rank took to move them.
        """
        if self._config.training.top_entropy_quantile < 1:
            batches = list(batches)
            scale = replace(scale, entropy_cut=self._entropy_cut(batches))
        learning_rate = self.schedule.get_last_lr()[0]
        sums = self._accumulate(batches, count, scale)
        finished = self._finish_step()
        return sums.reduce(scale.num_tokens) | finished | {"learning_rate": learning_rate}

    def rehearse(self, batches: Iterable[MicroBatch], count: int) -> None:
        """Run the passes of a step, and drop its gradients; collective, as `step`.

        Weights, the optimizer, the schedule, random numbers and DeepSpeed's counters stay as they are.
        """
        cut = EntropyCut(threshold=0.0, num_tokens=1) if self._config.training.top_entropy_quantile < 1 else None
        scale = LossScale(num_sequences=1, num_tokens=1, entropy_cut=cut)
        with undisturbed(self.deepspeed_engine):
            self._accumulate(batches, count, scale, is_dropped=True)
            _, is_skipped = self._update()
        assert is_skipped, "the gradients of a rehearsal were applied"

    def _accumulate(
        self, batches: Iterable[MicroBatch], count: int, scale: LossScale, *, is_dropped: bool = False
    ) -> StepSums:
        """Run the passes of a step, which is skipped if `is_dropped`."""
        self.deepspeed_engine.train()
        sums = StepSums(counts=self._counts)
        with self._reduction():
            for index, batch in enumerate(batches):
                self.deepspeed_engine.set_gradient_accumulation_boundary(index == count - 1)
                with explained_memory(batch):
                    self._backward(batch.to(self.device), scale, sums, is_dropped=is_dropped)
        return sums

    def _backward(self, batch: MicroBatch, scale: LossScale, sums: StepSums, *, is_dropped: bool = False) -> None:
        training = self._config.training
        # Before the policy's forward pass, since the reference may be the same modules: after it, the modules' hooks
        # expect the backward pass.
        reference = self._reference if training.kl_coef > 0 else None
        ref_logprobs_BT = reference.logprobs(batch, training.temperature) if reference else None
        with self._activations.offloaded() if self._activations else nullcontext():
            model = self.head.per_token(
                self.deepspeed_engine, batch, training.temperature, Truncation.of(training), Penalties.of(training)
            )
        output, differences = batch_loss(
            model,
            batch,
            training,
            scale=scale,
            ref_logprobs_BT=ref_logprobs_BT,
            own_loss=self._own_loss,
        )
        loss = poisoned(output.loss)
        if is_dropped:  # a loss may be finite where it masks or clips; no gradient is with NaN at each token
            loss = loss + math.nan * model.logprobs_BT.sum()
        # DeepSpeed averages gradients over ranks, but the ranks' shares of the loss add up. The ranks of a sequence
        # group have the same loss, but each only the gradients of its own tokens' log-probabilities: these add up, too.
        self.deepspeed_engine.backward(loss * dist.get_world_size())
        sums.add(output, differences)

    @torch.no_grad()
    def _entropy_cut(self, batches: Iterable[MicroBatch]) -> EntropyCut:
        """Find the step's tokens of the highest entropies in a forward pass before the training one; collective."""
        self.deepspeed_engine.eval()
        training, own = self._config.training, []
        for batch in batches:
            with explained_memory(batch):
                moved = batch.to(self.device)
                entropy_BT = self.head.per_token(self.deepspeed_engine, moved, training.temperature).entropy_BT
            own.append(entropy_BT[(moved.mask_BC > 0) & self._counts])
        return find_cut(of_all_ranks(torch.cat(own)), training.top_entropy_quantile)

    def _reduction(self) -> AbstractContextManager[None]:
        if not self._config.parallelism.coalesce_grad_reduction:
            return nullcontext()
        context: AbstractContextManager[None] = self.deepspeed_engine.coalesce_grad_reduction()
        return context

    def _update(self) -> tuple[float, bool]:
        """Apply the gradients; return their norm before clipping, and whether they were dropped as not finite."""
        clipped = (
            clip_or_drop(self.module, self._config.training.max_grad_norm) if trainer_clips(self._config) else None
        )
        with self.with_states():
            self.deepspeed_engine.step()
        # Otherwise DeepSpeed itself skips a step whose gradients are not finite, on all ranks.
        return clipped or (
            float(self.deepspeed_engine.get_global_grad_norm()),
            not self.deepspeed_engine.was_step_applied(),
        )

    def _finish_step(self) -> dict[str, float]:
        scale = self.deepspeed_engine.optimizer.loss_scale if self.deepspeed_engine.fp16_enabled() else None
        grad_norm, skipped = self._update()
        # Also after a skipped step: the learning rate depends on the number of the step, as in `go_to`.
        self.schedule.step()
        training = self._config.training
        if (reference := self.moved_reference) and self.num_steps % training.ref_model_sync_steps == 0:
            reference.follow(self.module, training.ref_model_mixup_alpha)
        metrics = {"grad_norm": grad_norm, "skipped": float(skipped)}
        if scale is not None:
            metrics["loss_scale"] = float(scale)
        if self._states is not None:
            metrics["time/offload"] = self._states.seconds
        return metrics

    @property
    def _counts(self) -> bool:
        """Whether this rank's micro-batches are not those that another rank counts."""
        return self.group is None or self.group.is_first

    @property
    def trains_on_gpu(self) -> bool:
        """Whether weights and optimizer states are on a GPU while the optimizer updates them."""
        return self.device.type == "cuda" and self._config.parallelism.offload_optimizer != "cpu"

    @property
    def puts_states_away(self) -> bool:
        """Whether optimizer states are in host memory except during the optimizer's step."""
        return self._states is not None

    @property
    def has_int8_moments(self) -> bool:
        """Whether AdamW's moments are in 8 bits."""
        return self._config.parallelism.optimizer_dtype == "int8"

    def with_states(self) -> AbstractContextManager[None]:
        """Within it, optimizer states are on the device, where the optimizer updates them."""
        return self._states.on_device() if self._states else nullcontext()

    @contextmanager
    def converted_arrives(self) -> Iterator[None]:
        """Within it, DeepSpeed may load a checkpoint that was converted."""
        with self.with_states():
            if not self.has_int8_moments:
                yield
                return
            from grpo_workload.policy.step.int8_moments import plain_moments_arrive  # late: see `environment.show`

            with plain_moments_arrive(self.deepspeed_engine):
                yield

    @torch.no_grad()
    def logprobs(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        penalties: Penalties | None = None,
    ) -> Tensor:
        """Log-probabilities of the completion tokens [B, T], see `LogprobHead.per_token`; collective under ZeRO-3."""
        self.deepspeed_engine.eval()
        moved = batch.to(self.device)
        return self.head.per_token(self.deepspeed_engine, moved, temperature, truncation, penalties).logprobs_BT

    @torch.no_grad()
    def divergence(self, batch: MicroBatch, temperature: float) -> Tensor:
        """KL divergence of each completion from the reference model [B], in nats; needs `beta` > 0.

        The sum of log pi - log pi_ref over its tokens (http://joschu.net/blog/kl-approx.html, k1), of the whole
        distributions. Collective under ZeRO-3.
        """
        assert self._reference is not None
        moved = batch.to(self.device)
        ref_logprobs_BT = self._reference.logprobs(moved, temperature)
        return ((self.logprobs(moved, temperature) - ref_logprobs_BT) * moved.mask_BC).sum(dim=1)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps taken since the run began."""
        return int(self.schedule.scheduler.last_epoch)

    @property
    def following_reference(self) -> Reference | None:
        """The reference model if it follows the policy (`training.syncRefModel`)."""
        return self._reference if self._config.training.sync_ref_model else None

    @property
    def moved_reference(self) -> Reference | None:
        """The reference model if it is not the initial one any more."""
        has_moved = self.num_steps >= self._config.training.ref_model_sync_steps
        return self.following_reference if has_moved else None

    def go_to(self, step: int) -> None:
        """Set the learning rate's schedule to its state after `step` optimizer steps."""
        self.schedule.scheduler.step(step)

    def weights(self) -> Export:
        """The weights that vLLM engines get, in the training dtype: all that a checkpoint holds, or adapters."""
        weights = self.adapters.pushed() if self.adapters else full(self.module)
        return Export(weights, is_partitioned=self.is_partitioned, group=self._names.group)

    def adapter_weights(self) -> Export:
        """The weights of the adapters, which `save_adapters` takes."""
        assert self.adapters is not None
        return Export(self.adapters.saved(), is_partitioned=self.is_partitioned)

    def merged_weights(self) -> Export:
        """All weights under the checkpoint's names, with adapters merged in."""
        weights = merged(self.module) if self.adapters else full(self.module)
        return Export(weights, is_partitioned=self.is_partitioned, group=self._names.group)

    def save_config(self, folder: Path) -> None:
        """Write what transformers' `from_pretrained` needs beside `merged_weights`; any thread may do it."""
        save_config(self.module, folder)

    def save_adapters(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write a folder that peft's `from_pretrained` loads. Only the thread that trains may: peft uses the module."""
        assert self.adapters is not None
        self.adapters.save(folder, weights)


def _accelerator(ds_config: dict[str, Any], config: TrainerConfig, device: Device, timeout_seconds: int) -> Accelerator:
    join(device, timeout_seconds)
    return Accelerator(
        mixed_precision=mixed_precision(config),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config, zero3_init_flag=config.parallelism.zero_stage == 3),
        step_scheduler_with_optimizer=False,
    )
