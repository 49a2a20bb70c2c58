"""The loss of a micro-batch as a job sets it: from what the model says of its tokens to the loss and its metrics.

Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from torch import Tensor

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm import mismatch
from grpo_workload.algorithm.loss import LossOutput, LossScale, grpo_loss
from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.policy.logprobs.head import PerToken
from grpo_workload.policy.loss.own_loss import OwnLoss


def batch_loss(
    model: PerToken,
    batch: MicroBatch,
    training: TrainingConfig,
    *,
    scale: LossScale,
    ref_logprobs_BT: Tensor | None = None,
    own_loss: OwnLoss | None = None,
) -> tuple[LossOutput, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return the micro-batch's share of the step's loss, and its `mismatch.tally`.

    Args:
        model: of the policy that is trained, with a graph.
        batch: on the same device.
        training: the job's settings.
        scale: denominators of the whole step.
        ref_logprobs_BT: of the reference model; given exactly when `kl_coef` > 0.
        own_loss: given exactly when `training.loss` is set.
    """
    old_logprobs_BT = model.logprobs_BT.detach() if batch.old_logprobs_BC is None else batch.old_logprobs_BC
    log_ratios_BT = mismatch.log_ratios(old_logprobs_BT, batch.sampling_logprobs_BC, batch.mask_BC)
    correction = training.importance_sampling_correction
    weights_BT = mismatch.weights(
        log_ratios_BT, correction, training.importance_sampling_clip_min, training.importance_sampling_clip_max
    )
    threshold, logprobs_BT = training.off_policy_mask_threshold, model.logprobs_BT.detach()
    kept_B1 = (
        None
        if threshold is None
        else mismatch.near_policy(logprobs_BT, batch.sampling_logprobs_BC, batch.advantages_B, batch.mask_BC, threshold)
    )
    output = grpo_loss(
        model.logprobs_BT,
        old_logprobs_BT - (log_ratios_BT if correction == "bypass" else 0),
        batch.advantages_B,
        batch.mask_BC,
        scale=scale,
        training=training,
        whole_logprobs_BT=model.whole_logprobs_BT,
        ref_logprobs_BT=ref_logprobs_BT,
        entropy_BT=model.entropy_BT,
        weights_BT=weights_BT,
        kept_B1=kept_B1,
        tokens_B=batch.tokens_B,
        own_loss=own_loss,
        adds_kl=own_loss is None or not own_loss.has_kl,
    )
    return output, mismatch.tally(log_ratios_BT, weights_BT, batch.mask_BC)
