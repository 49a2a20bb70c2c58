"""Plain `generate()` of the policy itself: for machines that vLLM does not run on, for debugging, and for quick tests.

There is one copy of the weights, so nothing is ever out of step. Scores of all new tokens are held at once: not for long completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

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
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        if training.temperature == 0:
            self._arguments |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            self._arguments |= {
                "do_sample": True,
                "temperature": training.temperature,
                "top_p": training.top_p,
                "top_k": training.top_k,
            }

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        """See `Generator.generate`."""
        module = self._policy.module
        was_training = module.training
        module.eval()
        rows = [torch.tensor(prompt.token_ids) for prompt in prompts for _ in range(num_generations)]
        ids_NP = _left_pad(rows, self._tokenizer.pad_token_id).to(self._policy.device)
        mask_NP = _left_pad([torch.ones_like(row) for row in rows], 0).to(self._policy.device)
        # Under ZeRO-3 every forward is collective, so ranks whose completions are done run on until those of all ranks are.
        output = module.generate(input_ids=ids_NP, attention_mask=mask_NP, synced_gpus=self._policy.is_partitioned, **self._arguments)
        module.train(was_training)
        tokens_NT = output.sequences[:, ids_NP.size(1) :]
        logprobs_NT = torch.stack([_logprobs(scores, tokens_NT[:, t]) for t, scores in enumerate(output.scores)], dim=1)
        flat = [self._completion(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in zip(tokens_NT, logprobs_NT, strict=True)]
        return [flat[start : start + num_generations] for start in range(0, len(flat), num_generations)]

    def sleep(self) -> None:
        """Nothing to give back: the weights are the trainer's own."""

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


def _eos_ids(generation_config: Any, tokenizer: Any) -> set[int]:
    ids = generation_config.eos_token_id
    return {tokenizer.eos_token_id, *([ids] if isinstance(ids, int) else ids or [])}


def _left_pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")


def _logprobs(scores_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return scores_NV.float().log_softmax(dim=-1).gather(1, tokens_N.unsqueeze(1)).squeeze(1)
