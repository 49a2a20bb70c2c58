"""Reads rows when a rank starts: to find those that cannot be used, prompts that are too long, and the longest one."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prompt_source import PromptSource

logger = logging.getLogger(__name__)

SCAN_SECONDS = 30.0
"""Longest scan. Rows that it does not reach are checked when their step prepares them, as all rows are."""
FEW = 8
"""Rows that are read where each may take seconds: where the user's function or a generator makes them, or of images."""


class Longest(NamedTuple):
    """The longest prompt that was read."""

    prompt: Prompt | None  # None where the rank has no row
    is_known: bool  # the rank's other steps have no longer one

    @property
    def tokens(self) -> int:
        """Number of its tokens; 1 without a prompt."""
        return len(self.prompt.token_ids) if self.prompt else 1


def scan(
    source: PromptSource,
    *,
    share: Sequence[int],
    prompts_per_step: int,
    steps: range,
    look: Callable[[Prompt], None] = lambda _: None,
) -> Longest:
    """Read the rows that one rank will use, in their order, for at most SCAN_SECONDS; log what was found.

    One pass through the dataset is enough: in later ones, ranks meet each other's rows. Of a run that goes on in
    the middle of one, that and the next one are read; of a source that is not scannable, FEW rows.

    Args:
        source: the prompts.
        share: positions of this rank's prompts in a step.
        prompts_per_step: number of prompts in a step, over all ranks.
        steps: the steps that the loop will take.
        look: is called with the prompt of each row.

    Returns:
        The longest prompt, as long as it is trained on.

    Raises:
        PromptError: a row cannot be used; with `overlongPrompts: error`, also one that is too long.
        PreprocessError: a row could not be prepared this time.
    """
    limit = source.limit
    rows, passed = len(source), steps.start * prompts_per_step % len(source) if len(steps) else 0
    rest = math.ceil((rows - passed) / prompts_per_step) if passed else 0
    epoch = itertools.islice(steps, rest + math.ceil(rows / prompts_per_step))
    end = time.monotonic() + SCAN_SECONDS
    seen: set[int] = set()
    too_long: dict[int, int] = {}  # number of tokens, by row
    longest: Prompt | None = None
    is_whole = source.is_scannable
    for step, position in itertools.product(epoch, share):
        draw = source.draw(step, position, prompts_per_step)
        if draw.index in seen:
            continue
        if not source.is_scannable and len(seen) == FEW:
            break
        if time.monotonic() > end:
            logger.info("dataset: the lengths of %d rows are known; others are checked at their step", len(seen))
            is_whole = False
            break
        seen.add(draw.index)
        prompt = source.make(draw)
        if source.is_scannable:
            look(prompt)
        if limit is not None and not limit.fits(prompt):
            if limit.action == "error":
                raise limit.error(prompt)
            too_long[draw.index] = len(prompt.token_ids)
            if limit.action == "skip" or prompt.images is not None:
                continue
            prompt = limit.truncated(prompt)
        if longest is None or len(prompt.token_ids) > len(longest.token_ids):
            longest = prompt
    if too_long:
        assert limit is not None
        most = max(too_long, key=lambda index: too_long[index])
        logger.warning(
            "dataset.overlongPrompts is %s: %d of %d rows for this rank have more than %d tokens; the longest, row %d, "
            "has %d",
            limit.action,
            len(too_long),
            len(seen),
            limit.max_tokens,
            most,
            too_long[most],
        )
    return Longest(longest, is_whole)
