"""A loss of the user's own: the function `training.loss` (module:function), called once for each micro-batch.

Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from grpo_spec.errors import ConfigError
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import TokenLosses, Tokens
from grpo_workload.data.prompt_maker import what_was_raised
from grpo_workload.data.user_code import import_function

ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "mask", "training", "ref_log_probs", "entropies")
_ONLY_BY_NAME = ("ref_log_probs", "entropies")  # not by **arguments: whoever names them changes what else is computed
METRIC = "loss/"
"""Begins the names of the metrics that the function returns."""


class OwnLoss:
    """The user's function, in place of the token losses of `lossType`.

    It gets by keyword those of ARGUMENTS that it names. All but `training` are float32 tensors [B, T]: log-
    probabilities that are trained (with a graph), those of the policy that the generation began with, advantages, 1
    where a token is in the loss, with `beta` > 0 log-probabilities of the reference model, and entropies in nats (with
    a graph). `training` is the job's section. Where the mask is 0, log-probabilities and entropies are 0.

    It returns token losses [B, T], or a pair of them and a dict of [B, T] values, whose means over tokens become the
    metrics loss/NAME. What it returns where the mask is 0 is not used.
    """

    def __init__(self, training: TrainingConfig) -> None:
        """Import `training.loss`, and try it on a few tokens on the CPU.

        Raises:
            ConfigError: it cannot be imported or called, or what it returns cannot be trained on.
        """
        assert training.loss is not None
        self._where = f"training.loss: {training.loss}"
        self._function = import_function("training.loss", training.loss)
        self._names = self._find_names(training)
        self.has_kl = "ref_log_probs" in self._names
        self.has_entropy = "entropies" in self._names
        self._try(training)

    def __call__(self, tokens: Tokens, training: TrainingConfig) -> TokenLosses:
        """Return the token losses and what is to be averaged. ConfigError if they have another type or shape."""
        given: dict[str, Any] = {
            "log_probs": tokens.logprobs_BT,
            "old_log_probs": tokens.old_logprobs_BT,
            "advantages": tokens.advantages_B1.expand_as(tokens.mask_BT),
            "mask": tokens.mask_BT,
            "ref_log_probs": tokens.ref_logprobs_BT,
            "entropies": tokens.entropy_BT,
            "training": training,
        }
        result = self._function(**{name: given[name] for name in self._names})
        losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(metrics, dict):
            raise ConfigError(
                f"{self._where} returned a pair with a {type(metrics).__name__}; return losses, or losses "
                "and a dict of metrics"
            )
        shape = list(tokens.mask_BT.shape)
        for what, values in {
            "losses": losses,
            **{f"the metric {name}": value for name, value in metrics.items()},
        }.items():
            if not isinstance(values, Tensor) or list(values.shape) != shape:
                found = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
                raise ConfigError(f"{self._where} returned {what} of {found}; return a tensor {shape}, a value a token")
        masked_BT = tokens.mask_BT == 0
        return losses.masked_fill(masked_BT, 0.0), {
            f"{METRIC}{name}": values.detach().float().masked_fill(masked_BT, 0.0) for name, values in metrics.items()
        }

    def _find_names(self, training: TrainingConfig) -> list[str]:
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._where} does not say what arguments it takes: name a function of Python"
            ) from error
        missing = [] if training.kl_coef > 0 else ["ref_log_probs"]
        named = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        needed = [one.name for one in parameters if one.default is one.empty and one.kind != one.VAR_KEYWORD]
        for name in needed:
            if name in missing:
                raise ConfigError(f"{self._where} takes {name}, but there is no reference model; set training.beta")
            if name not in named.intersection(ARGUMENTS):
                raise ConfigError(f"{self._where} takes {name}; arguments are {', '.join(ARGUMENTS)}, by keyword")
        takes_all = any(one.kind == one.VAR_KEYWORD for one in parameters)
        return [
            name
            for name in ARGUMENTS
            if name not in missing and (name in named or (takes_all and name not in _ONLY_BY_NAME))
        ]

    def _try(self, training: TrainingConfig) -> None:
        """Call it with ratios on both sides of 1, advantages of both signs, and a sequence outside the loss.

        Then with nothing in the loss: such a micro-batch fills up a rank that has fewer than others.
        """
        mask_BT = torch.tensor([[1.0, 1, 1], [1, 1, 0], [0, 0, 0]])
        gradient_BT = self._gradient(mask_BT, training, "log-probabilities of -6 to 0")
        if not gradient_BT.any():
            raise ConfigError(
                f"{self._where} returned losses that do not depend on log_probs: nothing would be trained"
            )
        self._gradient(torch.zeros(3, 3), training, "a micro-batch whose mask is 0")

    def _gradient(self, mask_BT: Tensor, training: TrainingConfig, what: str) -> Tensor:
        logprobs_BT = (-torch.arange(1.0, 10).view(3, 3) * mask_BT).requires_grad_()
        old_BT = torch.tensor([[-1.5, -2, -2.5], [-4, -5.1, -6], [-7, -8, -9]]) * mask_BT
        tokens = Tokens(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_BT,
            ratio_BT=(logprobs_BT - old_BT).exp(),
            advantages_B1=torch.tensor([[1.0], [-0.5], [0]]),
            mask_BT=mask_BT,
            ref_logprobs_BT=old_BT * 1.1 if training.kl_coef > 0 else None,
            entropy_BT=mask_BT * 1.5,
        )
        try:
            losses_BT, metrics = self(tokens, training)
            total = losses_BT.sum() + 0 * logprobs_BT.sum()  # which has a graph even if losses have none
            gradient_BT = torch.autograd.grad(total, logprobs_BT)[0]
        except ConfigError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(f"{self._where} {what_was_raised(error)}") from error
        for name, values in {"losses": losses_BT, "losses with a gradient": gradient_BT, **metrics}.items():
            if not values.isfinite().all():
                raise ConfigError(f"{self._where} returned {name} not finite for {what}")
        return gradient_BT
