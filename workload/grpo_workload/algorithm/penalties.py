"""Penalties for words that a sequence already has: by repetition, presence and frequency, as vLLM's sampler has them.

They change the logits before temperature and truncation (vllm/v1/sample/sampler.py, step 6). vLLM reports
log-probabilities of the distribution under them, so the trainer computes the same from its own logits. Between two
appearances of a word its logit changes in the same way, so what came before a token is kept as intervals: few numbers
for each token, where counts of all words would be as many as the logits.

Shapes: K completion tokens of all sequences, N tokens of all of them, I intervals, W words of a slice, P penalised
logits of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes of the logits of words that came before."""

    repetition: float = 1.0  # divides positive logits of words of prompt and completion, and multiplies negative ones
    presence: float = 0.0  # subtracted from logits of words of the completion
    frequency: float = 0.0  # likewise, once for each time that the word came

    @staticmethod
    def of(training: TrainingConfig) -> Penalties | None:
        """Return the penalties of a job; None if there are none."""
        own = (training.repetition_penalty, training.presence_penalty, training.frequency_penalty)
        return None if own == (1, 0, 0) else Penalties(*own)

    def on(self, batch: MicroBatch) -> Penalised:
        """Return what they do to the logits from which each completion token of `batch` was sampled."""
        batch = batch.apart()  # a prompt comes before each of its completions
        tokens_N, places_K = batch.input_ids_1N[0].long(), batch.places_K
        positions_N = torch.arange(len(tokens_N), device=tokens_N.device)
        bounds = batch.cu_seq_lens.long()
        sequence_N = torch.searchsorted(bounds[1:], positions_N, right=True)
        # A token counts from the first completion token after it on, to the last one of its sequence.
        rows_of = torch.searchsorted(places_K, bounds)
        first_N, stop_N = rows_of[sequence_N], rows_of[sequence_N + 1]
        row_N = torch.searchsorted(places_K, positions_N)
        is_own_N = row_N > first_N  # of the completion, not of the prompt
        key_N, order_N = (sequence_N * (tokens_N.max() + 1) + tokens_N).sort(stable=True)
        row_N, stop_N, is_own_N = row_N[order_N], stop_N[order_N], is_own_N[order_N].long()
        is_next_N = key_N[1:] == key_N[:-1]  # the same word of the same sequence, later
        stop_N[:-1] = torch.where(is_next_N, row_N[1:], stop_N[:-1])
        before_N = is_own_N.cumsum(0) - is_own_N
        before_N[1:].masked_fill_(is_next_N, 0)  # remains where a word comes for the first time
        count_N = is_own_N.cumsum(0) - before_N.cummax(0).values
        return Penalised(self, row_N, stop_N, tokens_N[order_N], count_N)


@dataclass(frozen=True, slots=True)
class Penalised:
    """The logits that penalties change: intervals of rows, one row for each completion token."""

    penalties: Penalties
    row_I: Tensor  # first row of an interval
    stop_I: Tensor  # row after its last
    word_I: Tensor
    count_I: Tensor  # how often the word came in the completion before these rows

    def among(self, chosen_P: Tensor) -> Penalised:
        """Return what they do to some of the rows, whose numbers are in ascending order."""
        row_I, stop_I = (torch.searchsorted(chosen_P, one) for one in (self.row_I, self.stop_I))
        return Penalised(self.penalties, row_I, stop_I, self.word_I, self.count_I)

    def apply(self, logits_KW: Tensor, row: int, word: int) -> tuple[Tensor, Tensor]:
        """Change logits in place, which begin with this row and this word.

        Returns:
            The places [P] of changed logits among all of `logits_KW`, and the derivatives [P] of the changed ones.
        """
        num_rows, num_words = logits_KW.shape
        first_I, stop_I = ((one - row).clamp(0, num_rows) for one in (self.row_I, self.stop_I))
        column_I = self.word_I - word
        chosen_I = (first_I < stop_I) & (column_I >= 0) & (column_I < num_words)
        first_I, column_I, count_I = first_I[chosen_I], column_I[chosen_I], self.count_I[chosen_I]
        length_I = stop_I[chosen_I] - first_I
        begin_I = length_I.cumsum(0) - length_I  # place of each interval's first logit among the changed ones
        start_P = (first_I - begin_I).repeat_interleave(length_I)
        row_P = start_P + torch.arange(len(start_P), device=start_P.device)
        place_P = row_P * num_words + column_I.repeat_interleave(length_I)
        flat = logits_KW.view(-1)
        own = self.penalties
        less_P = (own.frequency * count_I + own.presence * (count_I > 0)).repeat_interleave(length_I)
        logits_P = flat[place_P]
        slope_P = torch.where(logits_P > 0, 1 / own.repetition, own.repetition)
        flat[place_P] = logits_P * slope_P - less_P
        return place_P, slope_P
