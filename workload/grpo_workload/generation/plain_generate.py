"""Sampling with transformers' `generate()` on the policy itself: for machines without vLLM, debugging and quick tests.

There is only one copy of the weights, so they are always current.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.generation.base import SILENCE, Listener, Weights
from grpo_workload.policy.model.attention import VARLEN, cached
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather


class TransformersGenerator:
    """Samples with `policy.module.generate`. Shapes: N completions, P prompt tokens, T new tokens."""

    def __init__(self, model: ModelConfig, training: TrainingConfig, policy: Policy, tokenizer: Any) -> None:
        """Sample as `training` says. ConfigError if `model` has no token that ends a text."""
        self._policy = policy
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids(model, policy.module.generation_config, tokenizer)
        # Which token pads does not matter: it is masked.
        self._pad_id = min(self._eos_ids) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._version = 0
        self._training = training
        # In place of the model's own, which may have penalties and forbidden words. `_Sampler` draws, with one random
        # generator for each prompt; generate() has one for the whole batch.
        self._config = GenerationConfig(
            max_new_tokens=training.max_completion_length,
            pad_token_id=self._pad_id,
            eos_token_id=sorted(self._eos_ids),
            do_sample=False,
        )

    def begin(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE) -> None:
        """See `Generator.begin`; the spec allows no `maxStaleness` here."""
        raise AssertionError("training.maxStaleness is over 0")

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """See `Generator.generate`."""
        return self._generate(prompts, num_generations, self._training, listener)

    def evaluate(
        self, prompts: Sequence[Prompt], num_generations: int, temperature: float, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """See `Generator.evaluate`. As many completions at a time as in training, for which there is memory."""
        training = self._training.model_copy(update={"temperature": temperature})
        share = math.ceil(training.prompts_per_step / dist.get_world_size())
        size = max(1, share * training.num_generations // num_generations)
        rounds = max(gather(math.ceil(len(prompts) / size)))  # under ZeRO-3 each is collective
        parts = [prompts[start * size : (start + 1) * size] for start in range(rounds)]
        return [group for part in parts for group in self._generate(part, num_generations, training, listener)]

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Prompt], num_generations: int, training: TrainingConfig, listener: Listener
    ) -> list[list[Completion]]:
        if not prompts and not self._policy.is_partitioned:
            return []
        module = self._policy.module
        was_training, attention = module.training, module.config._attn_implementation
        own_config, module.generation_config = module.generation_config, self._config
        module.eval()
        if attention == VARLEN:
            module.set_attn_implementation(cached(module))
        # Under ZeRO-3 every forward is collective: a rank without prompts takes part with a made-up one, and ranks
        # whose completions are done continue until all ranks are done.
        asked = prompts or [Prompt(index=-1, text="", token_ids=(self._pad_id,))]
        rows = [torch.tensor(prompt.token_ids) for prompt in asked for _ in range(num_generations)]
        ids_NP = _left_pad(rows, self._pad_id).to(self._policy.device)
        mask_NP = _left_pad([torch.ones_like(row) for row in rows], 0).to(self._policy.device)
        seeds = [prompt.seed for prompt in asked]
        sampler = _Sampler(seeds, num_generations, self._policy.device, training, listener.moved)
        sequences = module.generate(
            input_ids=ids_NP,
            attention_mask=mask_NP,
            synced_gpus=self._policy.is_partitioned,
            logits_processor=LogitsProcessorList([sampler]),
        )
        module.generation_config = own_config
        module.set_attn_implementation(attention)
        module.train(was_training)
        tokens_NT, logprobs_NT = sequences[:, ids_NP.size(1) :], torch.stack(sampler.logprobs_N, dim=1)
        flat = [
            self._completion(tokens.tolist(), logprobs.tolist())
            for tokens, logprobs in zip(tokens_NT, logprobs_NT, strict=True)
        ]
        return [
            flat[start : start + num_generations] for start in range(0, len(prompts) * num_generations, num_generations)
        ]

    def sleep(self) -> None:
        """Do nothing: the weights are the trainer's own."""

    def expect_weights(self) -> None:
        """Do nothing: `sync_weights` has nobody to wait for."""

    def sync_weights(self, weights: Weights, version: int) -> None:
        """Only set the version: the weights are the trainer's own, and `weights` is not iterated."""
        self._version = version

    def logprobs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Return nothing: there is no engine to compare with."""
        return {}

    def idle_seconds(self) -> None:
        """See `Generator.idle_seconds`."""

    def engines(self) -> tuple[()]:
        """See `Generator.engines`."""
        return ()

    def left_out(self) -> tuple[()]:
        """See `Generator.left_out`."""
        return ()

    def blame(self, error: Exception) -> Exception:
        """See `Generator.blame`: there is no engine."""
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
    """Draws each row's next token with its prompt's random generator, and masks all other tokens for generate().

    It draws as `torch.multinomial` does: the index of the largest p / q, with q ~ Exp(1), is distributed as p.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        rows_per_seed: int,
        device: torch.device,
        training: TrainingConfig,
        moved: Callable[[], None],
    ) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._rows_per_seed = rows_per_seed
        self._temperature, self._truncation = training.temperature, Truncation.of(training)
        self._moved = moved
        self.logprobs_N: list[Tensor] = []
        """Log-probabilities of the chosen tokens, one tensor for each position."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [N, V] of the next token: 0 for the chosen one, minus infinity for all others."""
        self._moved()
        logits_NV = scores.float() / (self._temperature or 1.0)
        if self._truncation is not None:
            logits_NV.masked_fill_(~self._truncation.kept(scores), -torch.inf)
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        chosen_N1 = (self._race(logprobs_NV.exp()) if self._temperature else logprobs_NV).argmax(dim=-1, keepdim=True)
        self.logprobs_N.append(logprobs_NV.gather(1, chosen_N1).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen_N1, 0.0)

    def _race(self, probabilities_NV: Tensor) -> Tensor:
        shape = (self._rows_per_seed, probabilities_NV.size(1))
        draws = [
            torch.empty(shape, device=probabilities_NV.device).exponential_(generator=generator)
            for generator in self._generators
        ]
        return probabilities_NV / torch.cat(draws)


def eos_ids(model: ModelConfig, generation_config: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a text. ConfigError, naming the model's field, if there is none."""
    ids = generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *([ids] if isinstance(ids, int) else ids or [])} - {None}
    if not found:
        raise ConfigError(
            f"{model.field}: neither the tokenizer of {model.source} nor its generation_config.json names a token that "
            "ends a text, so completions would never end; set eos_token in its tokenizer_config.json, or eos_token_id "
            "in generation_config.json"
        )
    return found


def _left_pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")
