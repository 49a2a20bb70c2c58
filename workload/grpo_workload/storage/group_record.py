"""A prompt group, and the line of JSON that it is in the journal. Torch-free and pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_workload.algorithm.samples import Completion, Episode

Place = tuple[int, int]
"""A group's step and position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one prompt of a step, with their rewards."""

    step: int  # the first that trains on it
    position: int  # index of the prompt among those of the step, over all ranks
    slot: int  # its position, or more if it was sampled in place of another group: see `algorithm/resample.py`
    num_prompts: int  # prompts in the step
    prompt_index: int  # row of the prompt in the dataset
    prompt_ids: tuple[int, ...]  # of the row: an episode may have others
    completions: tuple[Completion, ...]
    rewards: Mapping[str, Sequence[float | None]]  # one value per completion, by name of the reward
    # Columns that rewards logged (TRL's `log_extra`), one value per completion, by name of the reward.
    extra: Mapping[str, Mapping[str, Sequence[object]]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Its step and position, which no other group of a run has."""
        return self.step, self.position

    def extra_of(self, number: int) -> dict[str, dict[str, object]]:
        """Return what rewards logged of completion `number`, by name of the reward."""
        return {
            name: {column: values[number] for column, values in columns.items()} for name, columns in self.extra.items()
        }

    @property
    def weight_versions(self) -> set[int]:
        """Versions of the weights that its completions were sampled with."""
        return {one.weight_version + update for one in self.completions for update in range(one.weight_updates + 1)}


def to_line(group: Group) -> bytes:
    """Return the group as a line of JSON."""
    values = {
        "step": group.step,
        "position": group.position,
        "numPrompts": group.num_prompts,
        "prompt": {"index": group.prompt_index, "tokenIds": group.prompt_ids},
        "rewards": {name: list(values) for name, values in group.rewards.items()},
    }
    if group.slot != group.position:
        values["slot"] = group.slot
    if group.extra:
        values["extra"] = group.extra
    completions = b",".join(map(_completion, group.completions))
    return _json(values)[:-1] + b',"completions":[' + completions + b"]}\n"


def from_line(text: bytes) -> Group:
    """Return the group of a line that `to_line` made."""
    line = json.loads(text)
    return Group(
        step=line["step"],
        position=line["position"],
        slot=line.get("slot", line["position"]),
        num_prompts=line["numPrompts"],
        prompt_index=line["prompt"]["index"],
        prompt_ids=tuple(line["prompt"]["tokenIds"]),
        rewards=line["rewards"],
        extra=line.get("extra", {}),
        completions=tuple(
            Completion(
                token_ids=tuple(completion["tokenIds"]),
                logprobs=tuple(np.asarray(completion["logprobs"], dtype=np.float32).tolist()),
                text=completion["text"],
                finish_reason=completion["finishReason"],
                weight_version=completion["weightVersion"],
                weight_updates=completion.get("weightUpdates", 0),
                episode=_episode_of(completion["episode"]) if "episode" in completion else None,
            )
            for completion in line["completions"]
        ),
    )


def _completion(completion: Completion) -> bytes:
    values = {
        "weightVersion": completion.weight_version,
        "tokenIds": completion.token_ids,
        "text": completion.text,
        "finishReason": completion.finish_reason,
    }
    if completion.weight_updates:
        values["weightUpdates"] = completion.weight_updates
    if completion.episode:
        values["episode"] = _episode(completion.episode)
    return _json(values)[:-1] + b',"logprobs":[' + _shortest(completion.logprobs) + b"]}"


def _episode(episode: Episode) -> dict[str, object]:
    """Return all of an episode but the state of its environment."""
    return {
        "messages": episode.messages,
        "context": episode.context,
        "promptIds": episode.prompt_ids,
        "observation": episode.observation,
        "asked": episode.asked,
        "turns": episode.num_turns,
        "calls": episode.num_calls,
        "failedCalls": episode.num_failed_calls,
        "callSeconds": episode.call_seconds,
        "waitSeconds": episode.wait_seconds,
        "retries": episode.retries,
        "reward": episode.reward,
        "lost": episode.lost,
        "failure": episode.failure,
    }


def _episode_of(values: Mapping[str, Any]) -> Episode:
    return Episode(
        messages=tuple(values["messages"]),
        context=tuple((start, stop) for start, stop in values["context"]),
        prompt_ids=None if values["promptIds"] is None else tuple(values["promptIds"]),
        observation=values["observation"],
        asked=tuple(values.get("asked", ())),  # came later than episodes
        num_turns=values["turns"],
        num_calls=values["calls"],
        num_failed_calls=values["failedCalls"],
        call_seconds=values["callSeconds"],
        wait_seconds=values.get("waitSeconds", 0.0),  # as `asked`
        retries=values["retries"],
        reward=values["reward"],
        lost=values["lost"],
        failure=values["failure"],
    )


def _json(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _shortest(values: Sequence[float]) -> bytes:
    """Write float32 values with the fewest digits that still read back as the same float32, which the loss uses.

    The rank trains meanwhile, so this does not hold Python's global lock for each value.
    """
    array = np.asarray(values, dtype=np.float32)
    texts = pc.if_else(np.isfinite(array), pa.array(array).cast(pa.string()), "NaN")
    bounds = pa.array([0, len(array)], pa.int32())
    joined: bytes = pc.binary_join(pa.ListArray.from_arrays(bounds, texts), ",")[0].as_buffer().to_pybytes()
    return joined
