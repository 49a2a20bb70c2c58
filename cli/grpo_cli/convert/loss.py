"""The loss, which tools name and bound in their own ways. Pure."""

from __future__ import annotations

from grpo_cli.convert.draft import Draft
from grpo_cli.convert.rows import Kind

_SCALES = {"rloo": "none", "reinforce_plus_plus": "batch"}
_TYPE, _LOW, _HIGH, _DELTA = "training.lossType", "training.epsilon", "training.epsilonHigh", "training.delta"
_CORRECTION = "training.importanceSamplingCorrection"


def settle_loss(draft: Draft) -> None:
    """Write the loss, its bounds, and what advantages are divided by."""
    facts = draft.facts
    if "use_kl_loss" in facts:
        draft.set("training.beta", facts.get("kl_coef", 0.001) if facts["use_kl_loss"] else 0.0)
    kind = facts.get("kl_loss_type", "k3")
    if facts.get("use_kl_loss") and kind.removesuffix("+") not in ("low_var_kl", "k3"):
        note = "the KL estimator is k3, its gradient corrected: low_var_kl+ would be the same"
        draft.left("kl_loss_type", kind, note, "training.beta")
    _kl_in_reward(draft)
    for fact, path in (("clip_ratio", _LOW), ("clipping", "training.maxGradNorm")):
        if fact in facts:
            draft.fields.setdefault(path, facts[fact])
    if (loss := facts.get("verl_loss", "vanilla")) != "vanilla":
        _verl(draft, loss)
    high = draft.fields.get(_HIGH) or draft.value(_LOW)
    if (delta := draft.fields.get(_DELTA)) and delta <= 1 + high:
        draft.drop(_DELTA)
        note = f"must be more than 1 + epsilonHigh ({1 + high}), where ratios are clipped already"
        draft.left("delta", delta, note, _DELTA)
    if "norm_by_std" in facts:
        draft.set("training.scaleRewards", "group" if facts["norm_by_std"] else "none")
    if scale := _SCALES.get(draft.value("training.advantageEstimator")):
        draft.fields.setdefault("training.scaleRewards", scale)
    if facts.get("correct_importance") is False:
        draft.set(_CORRECTION, "none", "vllm_importance_sampling_correction is false")
    if "verl_batch" in facts:  # verl corrects nothing unless it is asked to; with bypass_mode the loss's own ratio does
        level = facts.get("rollout_is", "none")
        draft.set(_CORRECTION, "bypass" if facts.get("bypass") else level)
        if level != "none":
            draft.set("training.importanceSamplingClipMax", facts.get("rollout_is_threshold", 2.0))


def _kl_in_reward(draft: Draft) -> None:
    """A divergence in rewards has the weight `beta`, so that it cannot also be in the loss with another."""
    facts = draft.facts
    is_default = "swift_dataset" in facts and draft.value("training.advantageEstimator") != "grpo"
    if not facts.get("kl_in_reward", is_default):
        return
    if "verl_batch" in facts:
        if facts.get("use_kl_loss"):
            note = "the divergence is in the loss (use_kl_loss), or in rewards with klInReward, not in both"
            draft.left("use_kl_in_reward", True, note, "training.klInReward")
            return
        draft.set("training.beta", facts.get("kl_in_reward_coef", 0.001), "kl_ctrl.kl_coef")
    if draft.fields.get("training.beta"):
        draft.set("training.klInReward", True)


def _verl(draft: Draft, loss: str) -> None:
    """A loss of verl besides vanilla. Its cispo clips the ratio to 1 - clip_ratio_low and 1 + clip_ratio_high."""
    if loss == "cispo":
        low = draft.value(_LOW)
        draft.drop(_LOW)
        high = draft.fields.get(_HIGH, draft.facts.get("clip_ratio", draft.value(_LOW)))
        draft.set(_HIGH, 1 + high, "the largest ratio itself: 1 + clip_ratio_high")
        if low < 1:
            note = "cispo has no lower bound of the ratio; clip_ratio_low=1 would be the same"
            draft.left("clip_ratio_low", low, note, _LOW)
        if (averaged := draft.value(_TYPE)) != "dapo":
            draft.left("loss_agg_mode", averaged, "cispo is averaged over all tokens, as token-mean", _TYPE)
        draft.set(_TYPE, "cispo")
    else:
        if loss == "gspo":
            draft.set("training.importanceSamplingLevel", "sequence")
        written = "geo_mean" if loss == "gmpo" else loss
        draft.set(_TYPE, "grpo" if loss == "gspo" else loss, f"{written} averages so, whatever loss_agg_mode says")
    draft.drop(_DELTA)
    draft.find(Kind.NOT_NEEDED, "delta", "", f"{loss} has no second bound: clip_ratio_c is not used", _DELTA)
