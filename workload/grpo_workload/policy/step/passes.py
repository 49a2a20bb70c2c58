"""The passes of a step over this rank's micro-batches, whose gradients DeepSpeed's engine adds up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.loss import EntropyCut, LossScale
from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.policy.loss.entropy_cut import find_cut, of_all_ranks
from grpo_workload.policy.loss.own_loss import OwnLoss
from grpo_workload.policy.memory.activation_offload import Activations
from grpo_workload.policy.memory.memory_error import explained_memory
from grpo_workload.policy.step.finite import poisoned
from grpo_workload.policy.step.setup import Setup
from grpo_workload.policy.step.step_sums import StepSums


class Passes:
    """Forward and backward passes of a policy's model."""

    def __init__(self, config: TrainerConfig, setup: Setup, own_loss: OwnLoss | None) -> None:
        """Run passes of the model of `setup`; `own_loss` is the job's own function, if it has one."""
        self.config = config
        self._deepspeed_engine, self._head, self._reference = setup.deepspeed_engine, setup.head, setup.reference
        self._own_loss, self._device = own_loss, setup.accelerator.device
        # Whether this rank's micro-batches are not those that another rank counts.
        self._counts = setup.group is None or setup.group.is_first
        self._activations = Activations(self._device) if config.parallelism.offload_activations else None

    def accumulate(
        self, batches: Iterable[MicroBatch], count: int, scale: LossScale, *, is_dropped: bool = False
    ) -> StepSums:
        """Run the passes of a step, which is skipped if `is_dropped`; collective. For arguments see `Policy.step`."""
        self._deepspeed_engine.train()
        sums = StepSums(counts=self._counts)
        with self._reduction():
            for index, batch in enumerate(batches):
                self._deepspeed_engine.set_gradient_accumulation_boundary(index == count - 1)
                with explained_memory(batch):
                    self.backward(batch.to(self._device), scale, sums, is_dropped=is_dropped)
        return sums

    def backward(self, batch: MicroBatch, scale: LossScale, sums: StepSums, *, is_dropped: bool = False) -> None:
        """Run the passes of a micro-batch that is on the device, and add what they find to `sums`."""
        training = self.config.training
        # Before the policy's forward pass, since the reference may be the same modules: after it, the modules' hooks
        # expect the backward pass.
        reference = self._reference if training.kl_coef > 0 else None
        ref_logprobs_BT = reference.logprobs(batch, training.temperature) if reference else None
        with self._activations.offloaded() if self._activations else nullcontext():
            model = self._head.per_token(
                self._deepspeed_engine, batch, training.temperature, Truncation.of(training), Penalties.of(training)
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
        self._deepspeed_engine.backward(loss * dist.get_world_size())
        sums.add(output, differences)

    @torch.no_grad()
    def entropy_cut(self, batches: Iterable[MicroBatch]) -> EntropyCut:
        """Find the step's tokens of the highest entropies in a forward pass before the training one; collective."""
        self._deepspeed_engine.eval()
        training, own = self.config.training, []
        for batch in batches:
            with explained_memory(batch):
                moved = batch.to(self._device)
                entropy_BT = self._head.per_token(self._deepspeed_engine, moved, training.temperature).entropy_BT
            own.append(entropy_BT[(moved.mask_BC > 0) & self._counts])
        return find_cut(of_all_ranks(torch.cat(own)), training.top_entropy_quantile)

    def _reduction(self) -> AbstractContextManager[None]:
        if not self.config.parallelism.coalesce_grad_reduction:
            return nullcontext()
        context: AbstractContextManager[None] = self._deepspeed_engine.coalesce_grad_reduction()
        return context
