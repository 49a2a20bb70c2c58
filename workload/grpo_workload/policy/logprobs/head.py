"""The model's output layer, which returns log-probabilities and entropies of the completion tokens instead of logits.

The arithmetic (`logprobs`) runs inside the forward of the layer itself, so hooks on that layer work as usual: those of
ZeRO-3 gather its weight before both passes.

Shapes: B sequences, T completion tokens, K completion tokens of all sequences (targets), H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from grpo_workload.algorithm.micro_batch import MicroBatch
from grpo_workload.algorithm.penalties import Penalised, Penalties
from grpo_workload.algorithm.sequence_part import SequencePart
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.logprobs.logprobs import logprobs_and_entropies
from grpo_workload.policy.model.exchange import Exchange, of_all
from grpo_workload.policy.model.logit_change import LogitChange, unchanged
from grpo_workload.policy.model.router_replay import RouterReplay
from grpo_workload.ranks.sequence_group import SequenceGroup


class PerToken(NamedTuple):
    """The model's values of the completion tokens, [B, T] in float32 and nats, 0 at padding."""

    logprobs_BT: Tensor  # TRL's `per_token_logps`: of the distribution that sampling draws from
    entropy_BT: Tensor  # of the whole distribution; no gradient unless the head `trains_entropy`
    whole_logprobs_BT: Tensor  # of the whole distribution


class LogprobHead:
    """Makes a model's output layer (lm_head) return log-probabilities and entropies instead of logits, on request."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[Any] | None = None,
        *,
        trains_entropy: bool = False,
        replay: RouterReplay | None = None,
        group: SequenceGroup | None = None,
    ) -> None:
        """Wrap the model's output layer, or `layers` if it has several; `trains_entropy` gives entropies a graph.

        `replay` has the model's routers, which then choose the experts that micro-batches say. The ranks of `group`
        have the same micro-batches, and are fed a part of the tokens each.
        """
        self._trains_entropy, self.replay, self._group = trains_entropy, replay, group
        self._model, self.change = model, LogitChange.of(model)
        self._asked: tuple[Tensor, Tensor, float, Truncation | None, Penalised | None] | None = None
        for layer in layers or [model.get_output_embeddings()]:
            self._wrap(layer)

    def per_token(
        self,
        model: Any,
        batch: MicroBatch,
        temperature: float,
        truncation: Truncation | None = None,
        penalties: Penalties | None = None,
    ) -> PerToken:
        """Run `model` for log-probabilities and entropies of the completion tokens; collective over a sequence group.

        Args:
            model: the model whose output layer this wraps, or the DeepSpeed engine around it.
            batch: on the model's device.
            temperature: divides the logits.
            truncation: what sampling left out; None for nothing.
            penalties: what sampling did to the logits of words that came before; None for nothing.
        """
        penalised = None if penalties is None else penalties.on(batch)
        values_K3 = self._values(model, batch, temperature, truncation, penalised)
        entropy_K = values_K3[:, 1] if self._trains_entropy else values_K3[:, 1].detach()
        logprobs_BT, entropy_BT = batch.rows(values_K3[:, 0]), batch.rows(entropy_K)
        return PerToken(
            logprobs_BT, entropy_BT, batch.rows(values_K3[:, 2]) if truncation or penalties else logprobs_BT
        )

    def _values(
        self,
        model: Any,
        batch: MicroBatch,
        temperature: float,
        truncation: Truncation | None,
        penalised: Penalised | None,
    ) -> Tensor:
        """Return `logprobs_and_entropies` of all completion tokens."""
        part = None if self._group is None else SequencePart.of(batch, self._group.place, self._group.size)
        if self.replay is not None:
            self.replay.use(batch.experts_NLX if part is None else part.experts)
        if self._group is None or part is None:
            with self.targets(batch.places_K, batch.targets_K, temperature, truncation, penalised):
                whole_K3: Tensor = model(**batch.model_inputs()).logits
            return whole_K3
        exchange = Exchange(self._group, part.batch.num_tokens)
        own = None if penalised is None else penalised.among(part.own_P)
        with self.targets(part.places_P, part.targets_P, temperature, truncation, own):
            values_P3 = model(**part.model_inputs(), exchange=exchange).logits
        return of_all(values_P3, part.own_P, len(batch.places_K), self._group)

    def _wrap(self, output: nn.Linear) -> None:
        plain = output.forward

        def forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
            if self._asked is None:
                return plain(hidden)
            places_K, targets_K, temperature, truncation, penalised = self._asked
            hidden_KH = hidden.flatten(0, -2).index_select(0, places_K)
            return logprobs_and_entropies(
                hidden_KH,
                layer.weight,
                layer.bias,
                targets_K,
                temperature,
                truncation,
                self.change,
                penalised,
                trains_entropy=self._trains_entropy,
            )

        output.forward = MethodType(forward, output)  # type: ignore[method-assign]

    @contextmanager
    def targets(
        self,
        places_K: Tensor,
        targets_K: Tensor,
        temperature: float,
        truncation: Truncation | None = None,
        penalised: Penalised | None = None,
    ) -> Iterator[None]:
        """Within it, the model's `logits` are `logprobs_and_entropies` of the tokens `targets_K`.

        `places_K` are the positions of their hidden states, counted over all rows of the batch.
        """
        self._asked = places_K, targets_K, temperature, truncation, penalised
        try:
            with unchanged(self._model):
                yield
        finally:
            self._asked = None
