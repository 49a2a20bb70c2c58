"""The policy under DeepSpeed: one optimizer step over micro-batches, and its weights by name.

Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_spec.contract import Device
from grpo_spec.deepspeed_config import trainer_clips
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.loss import EntropyCut, LossScale
from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.adapters.adapter_weights import merged
from grpo_workload.policy.loss.own_loss import OwnLoss
from grpo_workload.policy.model.checkpoint_names import save_config
from grpo_workload.policy.step.finite import clip_or_drop
from grpo_workload.policy.step.passes import Passes
from grpo_workload.policy.step.reference import Reference
from grpo_workload.policy.step.rehearsal import undisturbed
from grpo_workload.policy.step.setup import set_up
from grpo_workload.weights.export import Export, full


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
        own_loss = OwnLoss(config.training) if config.training.loss else None
        made = set_up(
            config,
            device,
            timeout_seconds=timeout_seconds,
            pad_token_id=pad_token_id,
            trains_entropy=config.training.entropy_coef > 0 or (own_loss is not None and own_loss.has_entropy),
            load_universal=load_universal,
            reference=reference,
        )
        self.is_partitioned = config.parallelism.zero_stage == 3
        self.device: torch.device = made.accelerator.device
        self.group, self.shares_prompts = made.group, made.shares_prompts
        self.adapters, self.head = made.adapters, made.head
        self.deepspeed_engine, self.schedule = made.deepspeed_engine, made.schedule
        self.passes = Passes(config, made, own_loss)
        self._accelerator, self._names = made.accelerator, made.names
        self._states, self._reference = made.states, made.reference

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
            scale = replace(scale, entropy_cut=self.passes.entropy_cut(batches))
        learning_rate = self.schedule.get_last_lr()[0]
        sums = self.passes.accumulate(batches, count, scale)
        finished = self._finish_step()
        return sums.reduce(scale.num_tokens) | finished | {"learning_rate": learning_rate}

    def rehearse(self, batches: Iterable[MicroBatch], count: int) -> None:
        """Run the passes of a step, and drop its gradients; collective, as `step`.

        Weights, the optimizer, the schedule, random numbers and DeepSpeed's counters stay as they are.
        """
        cut = EntropyCut(threshold=0.0, num_tokens=1) if self._config.training.top_entropy_quantile < 1 else None
        scale = LossScale(num_sequences=1, num_tokens=1, entropy_cut=cut)
        with undisturbed(self.deepspeed_engine):
            self.passes.accumulate(batches, count, scale, is_dropped=True)
            _, is_skipped = self._update()
        assert is_skipped, "the gradients of a rehearsal were applied"

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
