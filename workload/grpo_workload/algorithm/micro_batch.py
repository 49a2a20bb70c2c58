"""Samples as a micro-batch: their sequences end to end, without padding.

Shapes: B sequences of a micro-batch, N tokens of all of them, K completion tokens of all of them, C tokens of the
longest completion, L layers, X experts of a token. Values of completion tokens are right-padded to [B, C]; the model
itself never sees padding.

Sequences may share the tokens of a prompt, which are then among the N once: see `shared_prompts.py`.

Completion tokens are those that the policy sampled. The model reads an episode's context, as it reads the prompt, but
there is no place for it in [K] and [B, C]: so nothing that is computed of completions has to leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.shared_prompts import Layout, SharedKeys

_BY_SEQUENCE = ("mask_BC", "is_token_BC", "sampling_logprobs_BC", "advantages_B", "old_logprobs_BC", "tokens_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The model's inputs and what the loss needs, for packed sequences of prompt and completion."""

    input_ids_1N: Tensor
    position_ids_1N: Tensor  # counted from 0 in each sequence
    cu_seq_lens: Tensor  # int32 [B + 1]: the offset at which each sequence begins, or what is fed of it, and N
    max_length: int  # tokens that are fed of the longest sequence
    places_K: Tensor  # positions (in N) whose next token belongs to a completion
    targets_K: Tensor  # ids of those next tokens
    mask_BC: Tensor  # TRL's `completion_mask` in float32: 1 where a token is in the loss
    is_token_BC: Tensor  # bool: True at the K completion tokens, False at padding
    sampling_logprobs_BC: Tensor  # TRL's `sampling_per_token_logps`, from the generator; 0 at padding
    advantages_B: Tensor
    # TRL's `old_per_token_logps`, of the policy that the generation began with; None: the policy that trains on it.
    old_logprobs_BC: Tensor | None = None
    # Own tokens of the whole completion, of which a sequence may be one of several; None: each is all of one.
    tokens_B: Tensor | None = None
    # The model's arguments for the images of each sequence, none of them for one of text alone; empty without images.
    # Sequences of one prompt have the same object.
    images_B: tuple[Mapping[str, Tensor], ...] = ()
    is_image_1N: Tensor | None = None  # bool: True at the tokens in whose place features of these images are
    # int16: the experts that vLLM sent each token to, -1 where the trainer's routers choose; None: they do everywhere.
    experts_NLX: Tensor | None = None
    keys: SharedKeys | None = None  # None: no sequences share a prompt

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model is fed."""
        return self.input_ids_1N.numel()

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.advantages_B)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Split at least two sequences into two micro-batches, in order; values per token keep their width C."""
        if self.keys is not None:
            return self.apart().halves()
        middle = self.num_sequences // 2
        cut = int(self.cu_seq_lens[middle])
        return self._part(slice(middle), slice(cut)), self._part(slice(middle, None), slice(cut, None))

    def apart(self) -> MicroBatch:
        """Copy in which each sequence has its whole prompt: for what looks at the tokens of single sequences."""
        if self.keys is None:
            return self
        return replace(
            self,
            input_ids_1N=self.input_ids_1N[:, self.keys.places_M],
            position_ids_1N=self.position_ids_1N[:, self.keys.places_M],
            cu_seq_lens=self.keys.bounds,
            max_length=self.keys.longest,
            places_K=self.keys.places_K,
            keys=None,
        )

    def _part(self, rows: slice, tokens: slice) -> MicroBatch:
        start, stop, _ = tokens.indices(self.num_tokens)
        first, last, _ = rows.indices(self.num_sequences)
        bounds = self.cu_seq_lens[first : last + 1] - start
        inside_K = (self.places_K >= start) & (self.places_K < stop)
        return MicroBatch(
            input_ids_1N=self.input_ids_1N[:, tokens],
            position_ids_1N=self.position_ids_1N[:, tokens],
            cu_seq_lens=bounds,
            max_length=int(bounds.diff().max()),
            places_K=self.places_K[inside_K] - start,
            targets_K=self.targets_K[inside_K],
            images_B=self.images_B[rows],
            is_image_1N=None if self.is_image_1N is None else self.is_image_1N[:, tokens],
            experts_NLX=None if self.experts_NLX is None else self.experts_NLX[tokens],
            **{name: tensor[rows] for name in _BY_SEQUENCE if (tensor := getattr(self, name)) is not None},
        )

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the micro-batch on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        images = {
            id(one): {name: tensor.to(device, non_blocking=True) for name, tensor in one.items()}
            for one in {id(one): one for one in self.images_B}.values()
        }
        moved_keys = None if self.keys is None else self.keys.to(device)
        moved_images = tuple(images[id(one)] for one in self.images_B)
        return MicroBatch(**values | moved | {"images_B": moved_images, "keys": moved_keys})

    def model_inputs(self) -> dict[str, object]:
        """Arguments for a transformers model, whose attention finds sequences by their bounds or by positions of 0."""
        bounds = {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
        longest = {"max_length_q": self.max_length, "max_length_k": self.max_length}
        # `policy/model/vision.py` turns them into arguments of the model.
        images = {"images_B": self.images_B, "is_image_1N": self.is_image_1N} if any(self.images_B) else {}
        # `policy/model/attention.py` takes them out of the arguments of the model.
        shared = {} if self.keys is None else {"shared_keys": self.keys}
        return {
            "input_ids": self.input_ids_1N,
            "position_ids": self.position_ids_1N,
            "use_cache": False,
            **bounds,
            **longest,
            **images,
            **shared,
        }

    def rows(self, values_K: Tensor) -> Tensor:
        """Spread the values of completion tokens [K] to [B, C], 0 at padding; differentiable."""
        return values_K.new_zeros(self.is_token_BC.shape).masked_scatter(self.is_token_BC, values_K)


def micro_batch(samples: Sequence[Sample], shared: Sequence[int] = ()) -> MicroBatch:
    """Pack `samples`, of one sequence each (`Sample.sequence`), into one micro-batch.

    Args:
        samples: the samples.
        shared: number of first tokens of each that it shares with another: see `Layout`; at most all of its prompt.
            Without images and routed experts alone. Empty: none shares any.
    """
    completions = [sample.completion for sample in samples]
    sequences = [
        (*one.prompt_ids(sample.prompt), *one.token_ids) for sample, one in zip(samples, completions, strict=True)
    ]
    layout = Layout([len(ids) for ids in sequences], shared)
    own = [completion.own_places for completion in completions]
    before = [  # in each sequence: the tokens before those that were sampled
        torch.tensor(places, dtype=torch.long) + (len(ids) - len(completion.token_ids) - 1)
        for ids, completion, places in zip(sequences, completions, own, strict=True)
    ]
    fed = [range(skipped, len(ids)) for ids, skipped in zip(sequences, layout.shared, strict=True)]
    mask_BC = _pad([torch.ones(len(places)) for places in own])
    return MicroBatch(
        input_ids_1N=torch.tensor(
            [[token for ids, part in zip(sequences, fed, strict=True) for token in ids[part.start :]]]
        ),
        position_ids_1N=torch.cat([torch.arange(part.start, part.stop) for part in fed]).unsqueeze(0),
        cu_seq_lens=torch.tensor(layout.starts, dtype=torch.int32),
        max_length=layout.longest,
        places_K=layout.places(before),
        keys=layout.keys(before),
        targets_K=torch.tensor(
            [
                completion.token_ids[place]
                for completion, places in zip(completions, own, strict=True)
                for place in places
            ]
        ),
        mask_BC=mask_BC,
        is_token_BC=mask_BC.bool(),
        sampling_logprobs_BC=_pad(
            [
                torch.tensor([completion.logprobs[place] for place in places], dtype=torch.float32)
                for completion, places in zip(completions, own, strict=True)
            ]
        ),
        advantages_B=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        tokens_B=_tokens(samples),
        experts_NLX=_experts(sequences, completions),
        **(_images(sequences, samples) if any(sample.prompt.images for sample in samples) else {}),
    )


def _tokens(samples: Sequence[Sample]) -> Tensor | None:
    if all(sample.num_own is None for sample in samples):
        return None
    counts = [sample.completion.num_own if sample.num_own is None else sample.num_own for sample in samples]
    return torch.tensor(counts, dtype=torch.float32)


def _experts(sequences: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Tensor | None:
    shape = next((one.routed_experts.shape[1:] for one in completions if one.routed_experts is not None), None)
    if shape is None:
        return None
    parts = [torch.full((len(ids), *shape), -1, dtype=torch.int16) for ids in sequences]
    for part, completion in zip(parts, completions, strict=True):
        if (routed := completion.routed_experts) is not None:
            part[:-1] = torch.from_numpy(routed[: len(part) - 1].astype("int16"))
    return torch.cat(parts)


def _images(sequences: Sequence[Sequence[int]], samples: Sequence[Sample]) -> dict[str, Any]:
    shown = [sample.prompt.images for sample in samples]
    # A completion may have the same token, as text.
    is_image = [
        images is not None and place < len(sample.completion.prompt_ids(sample.prompt)) and token == images.token_id
        for ids, sample, images in zip(sequences, samples, shown, strict=True)
        for place, token in enumerate(ids)
    ]
    inputs = {id(images.inputs): images.inputs for images in shown if images is not None}
    tensors = {key: {name: torch.from_numpy(array) for name, array in one.items()} for key, one in inputs.items()}
    images_B = tuple({} if images is None else tensors[id(images.inputs)] for images in shown)
    return {"images_B": images_B, "is_image_1N": torch.tensor([is_image])}


FILLER_TOKENS = 2
"""Number of tokens that the model is fed by a `filler`."""


def filler() -> MicroBatch:
    """Micro-batch outside the loss, for a rank with fewer than others: collectives of the backward pass must match."""
    answer = Completion(token_ids=(0,), logprobs=(0.0,), text="", finish_reason="stop", weight_version=0)
    batch = micro_batch(
        [Sample(prompt=Prompt(index=-1, text="", token_ids=(0,)), completion=answer, reward=0.0, advantage=0.0)]
    )
    return replace(batch, mask_BC=torch.zeros_like(batch.mask_BC))


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
