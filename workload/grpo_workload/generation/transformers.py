"""Plain `generate()` of the policy itself: for machines that vLLM does not run on, for debugging, and for quick tests.

There is one copy of the weights, so nothing is ever out of step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_workload.attention import VARLEN
from grpo_workload.config import TrainingConfig
from grpo_workload.generation.base import Weights
from grpo_workload.types import Completion, Prompt

if TYPE_CHECKING:
    from grpo_workload.engine import Policy


class TransformersGenerator:
    """Samples with `policy.module.generate`; shapes: N completions, P prompt tokens, T new tokens."""

    def __init__(self, training: TrainingConfig, policy: Policy, tokenizer: Any) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._eos_ids = _eos_ids(policy.module.generation_config, tokenizer)
        self._version = 0
        self._arguments: dict[str, Any] = {
            "max_new_tokens": training.max_completion_length,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": sorted(self._eos_ids),
            # `_Sampler` draws: sampling in generate() would take one row of random numbers for the whole batch.
            "do_sample": False,
            **dict.fromkeys(("temperature", "top_p", "top_k", "repetition_penalty")),
        }
        self._is_greedy = training.temperature == 0
        self._warpers: list[Any] = []
        if not self._is_greedy:
            self._warpers = [TemperatureLogitsWarper(training.temperature)]
            self._warpers += [TopKLogitsWarper(training.top_k)] if training.top_k > 0 else []
            self._warpers += [TopPLogitsWarper(training.top_p)] if training.top_p < 1 else []

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        """See `Generator.generate`."""
        if not prompts and not self._policy.is_partitioned:
            return []
        module = self._policy.module
        was_training, attention = module.training, module.config._attn_implementation
        module.eval()
        if attention == VARLEN:  # knows nothing of caches and padding
            module.set_attn_implementation("sdpa")
        # Under ZeRO-3 every forward is collective: a rank without prompts takes part with one of its own, and ranks whose completions are
        # done run on until those of all ranks are.
        asked = prompts or [Prompt(index=-1, text="", token_ids=(self._tokenizer.pad_token_id,))]
        rows = [torch.tensor(prompt.token_ids) for prompt in asked for _ in range(num_generations)]
        ids_NP = _left_pad(rows, self._tokenizer.pad_token_id).to(self._policy.device)
        mask_NP = _left_pad([torch.ones_like(row) for row in rows], 0).to(self._policy.device)
        sampler = _Sampler([prompt.seed for prompt in asked], num_generations, self._policy.device, is_greedy=self._is_greedy)
        sequences = module.generate(
            input_ids=ids_NP,
            attention_mask=mask_NP,
            synced_gpus=self._policy.is_partitioned,
            logits_processor=LogitsProcessorList([*self._warpers, sampler]),
            **self._arguments,
        )
        module.set_attn_implementation(attention)
        module.train(was_training)
        tokens_NT, logprobs_NT = sequences[:, ids_NP.size(1) :], torch.stack(sampler.logprobs_N, dim=1)
        flat = [self._completion(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in zip(tokens_NT, logprobs_NT, strict=True)]
        return [flat[start : start + num_generations] for start in range(0, len(prompts) * num_generations, num_generations)]

    def sleep(self) -> None:
        """Nothing to give back: the weights are the trainer's own."""

    def expect_weights(self) -> None:
        """Nothing to begin: `sync_weights` waits for nobody."""

    def sync_weights(self, weights: Weights, version: int) -> None:
        """Nothing to copy: the weights are the trainer's own. `weights` is not touched."""
        self._version = version

    def blame(self, error: Exception) -> Exception:
        """See `Generator.blame`: no engine stands apart from the rank."""
        return error

    def close(self) -> None:
        """See `Generator.close`."""
        dist.barrier()

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        end = next((position for position, token in enumerate(tokens) if token in self._eos_ids), None)
        length = len(tokens) if end is None else end + 1
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            text=self._tokenizer.decode(tokens[:length], skip_special_tokens=True),
            finish_reason="length" if end is None else "stop",
            weight_version=self._version,
        )


class _Sampler(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Chooses the next token of each row with its prompt's own generator, and leaves generate() no other choice.

    The exponential trick of `torch.multinomial`: the index of the largest p / q, q ~ Exp(1), is distributed as p.
    """

    def __init__(self, seeds: Sequence[int], rows_per_seed: int, device: torch.device, *, is_greedy: bool) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._rows_per_seed = rows_per_seed
        self._is_greedy = is_greedy
        self.logprobs_N: list[Tensor] = []
        """Of the chosen tokens, one tensor a position."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [N, V] of the next token: minus infinity for all but the chosen one."""
        logprobs_NV = scores.float().log_softmax(dim=-1)
        chosen_N1 = (logprobs_NV if self._is_greedy else self._race(logprobs_NV.exp())).argmax(dim=-1, keepdim=True)
        self.logprobs_N.append(logprobs_NV.gather(1, chosen_N1).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen_N1, 0.0)

    def _race(self, probabilities_NV: Tensor) -> Tensor:
        shape = (self._rows_per_seed, probabilities_NV.size(1))
        draws = [torch.empty(shape, device=probabilities_NV.device).exponential_(generator=generator) for generator in self._generators]
        return probabilities_NV / torch.cat(draws)


def _eos_ids(generation_config: Any, tokenizer: Any) -> set[int]:
    ids = generation_config.eos_token_id
    return {tokenizer.eos_token_id, *([ids] if isinstance(ids, int) else ids or [])}


def _left_pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")
