"""Lines of completions.jsonl: some completions of a step for people to read, of episodes as transcripts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from grpo_workload.algorithm.samples import Completion, Episode, Message, Sample
from grpo_workload.data.observation import asked

SAMPLES_PER_STEP = 4
"""Number of prompts of a step with one completion."""
LOST_PER_STEP = 2
"""Number of episodes of a step that were lost: what failed, for which prompt."""
HEAD, TAIL = 3000, 1000
"""Characters of a result that are kept of its begin and of its end."""


def readable(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a step from the samples of a rank: completions of its first prompts, then lost episodes."""
    there = [sample for sample in samples if not sample.completion.is_lost]
    first_by_prompt = {sample.prompt.index: sample for sample in reversed(there)}
    yield from map(_line, islice(reversed(first_by_prompt.values()), SAMPLES_PER_STEP))
    yield from map(_line, islice((sample for sample in samples if sample.completion.is_lost), LOST_PER_STEP))


def _line(sample: Sample) -> dict[str, Any]:
    completion, episode = sample.completion, sample.completion.episode
    line: dict[str, Any] = {
        "prompt": asked(sample.prompt, completion),
        "completion": [*map(_cut, episode.messages)] if episode else completion.text,
        "reward": sample.reward,
        "advantage": sample.advantage,
    }
    if episode:
        line["episode"] = _facts(completion, episode)
    return line | ({"extra": sample.extra} if sample.extra else {})


def _facts(completion: Completion, episode: Episode) -> dict[str, Any]:
    if episode.lost is not None:
        return {"lost": episode.lost, "failure": episode.failure, "retries": episode.retries}
    bounds = [0, *(bound for span in episode.context for bound in span), len(completion.token_ids)]
    return {
        "turns": episode.num_turns,
        "calls": episode.num_calls,
        "failed_calls": episode.num_failed_calls,
        "call_seconds": round(episode.call_seconds, 3),
        "wait_seconds": round(episode.wait_seconds, 3),
        "retries": episode.retries,
        "is_truncated": completion.finish_reason == "length",
        # Of the first turn, which the model sampled, of what it read after that, of the second turn, ...
        "tokens": [stop - start for start, stop in pairwise(bounds)],
    }


def _cut(message: Message) -> Message:
    """Cut what the model has not said itself: its own turns have a limit."""
    text = message.get("content")
    if message["role"] == "assistant" or not isinstance(text, str) or len(text) <= HEAD + TAIL:
        return message
    left_out = f" [... {len(text) - HEAD - TAIL:,} characters, which the journal has ...] "
    return message | {"content": text[:HEAD] + left_out + text[-TAIL:]}
