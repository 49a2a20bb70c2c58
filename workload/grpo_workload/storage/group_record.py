"""A prompt group, and the line of JSON that it is in the journal. Torch-free and pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_workload.algorithm.samples import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one prompt of a step, with their rewards."""

    step: int
    position: int  # index of the prompt among those of the step, over all ranks
    num_prompts: int  # prompts in the step
    prompt_index: int  # row of the prompt in the dataset
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: Mapping[str, Sequence[float | None]]  # one value per completion, by name of the reward

    @property
    def weight_versions(self) -> set[int]:
        """Versions of the weights that its completions were sampled with."""
        return {completion.weight_version for completion in self.completions}


def to_line(group: Group) -> bytes:
    """Return the group as a line of JSON."""
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
    """Return the group of a line that `to_line` made."""
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
    """Round float32 values to the fewest digits that still read back as the same float32, which the loss uses."""
    return [float(str(value)) for value in np.asarray(values, dtype=np.float32)]
