"""A group of GRPO, and how the journal writes it down. Torch-free and pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_workload.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one prompt of a step, with their rewards."""

    step: int
    position: int  # of the prompt among those of the step, over all ranks
    num_prompts: int  # of the step
    prompt_index: int  # in the dataset
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]  # which tell the weight version
    rewards: Mapping[str, Sequence[float | None]]  # by name, one a completion

    @property
    def weight_versions(self) -> set[int]:
        """Of its completions."""
        return {completion.weight_version for completion in self.completions}


def to_line(group: Group) -> bytes:
    """The group as a line of JSON."""
    values = {
        "step": group.step,
        "position": group.position,
        "numPrompts": group.num_prompts,
        "prompt": {"index": group.prompt_index, "tokenIds": group.prompt_ids},
        "rewards": {name: list(values) for name, values in group.rewards.items()},
        "completions": [
            {
                "weightVersion": completion.weight_version,
                "tokenIds": completion.token_ids,
                "logprobs": _shortest(completion.logprobs),
                "text": completion.text,
                "finishReason": completion.finish_reason,
            }
            for completion in group.completions
        ],
    }
    return f"{json.dumps(values, separators=(',', ':'))}\n".encode()


def from_line(text: bytes) -> Group:
    """The group that `to_line` made a line of."""
    line = json.loads(text)
    return Group(
        step=line["step"],
        position=line["position"],
        num_prompts=line["numPrompts"],
        prompt_index=line["prompt"]["index"],
        prompt_ids=tuple(line["prompt"]["tokenIds"]),
        rewards=line["rewards"],
        completions=tuple(
            Completion(
                token_ids=tuple(completion["tokenIds"]),
                logprobs=tuple(np.asarray(completion["logprobs"], dtype=np.float32).tolist()),
                text=completion["text"],
                finish_reason=completion["finishReason"],
                weight_version=completion["weightVersion"],
            )
            for completion in line["completions"]
        ),
    )


def _shortest(values: Iterable[float]) -> list[float]:
    """Float32 values with the fewest digits that give them back: the loss reads them as float32."""
    return [float(str(value)) for value in np.asarray(values, dtype=np.float32)]
