"""Reads rows when a rank starts, to find those that cannot be used and prompts that are too long."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prompt_source import PromptSource

logger = logging.getLogger(__name__)

SCAN_SECONDS = 30.0
"""Longest scan. Rows that it does not reach are checked when their step prepares them, as all rows are."""


def scan(
    source: PromptSource,
    *,
    share: Sequence[int],
    prompts_per_step: int,
    steps: range,
    look: Callable[[Prompt], None] = lambda _: None,
) -> None:
    """Read the rows that one rank will use, in their order, for at most SCAN_SECONDS; log what was found.

    One pass through the dataset is enough: in later ones, ranks meet each other's rows.

    Args:
        source: the prompts, with a limit.
        share: positions of this rank's prompts in a step.
        prompts_per_step: number of prompts in a step, over all ranks.
        steps: the steps that the loop will take.
        look: is called with the prompt of each row.

    Raises:
        PromptError: a row cannot be used; with `overlongPrompts: error`, also one that is too long.
    """
    limit = source.limit
    assert limit is not None
    epoch = itertools.islice(steps, math.ceil(len(source) / prompts_per_step))
    end = time.monotonic() + SCAN_SECONDS
    seen: set[int] = set()
    too_long: dict[int, int] = {}  # number of tokens, by row
    for step, position in itertools.product(epoch, share):
        draw = source.draw(step, position, prompts_per_step)
        if draw.index in seen:
            continue
        if time.monotonic() > end:
            logger.info("dataset: the lengths of %d rows are known; others are checked at their step", len(seen))
            break
        seen.add(draw.index)
        prompt = source.make(draw)
        look(prompt)
        if limit.fits(prompt):
            continue
        if limit.action == "error":
            raise limit.error(prompt)
        too_long[draw.index] = len(prompt.token_ids)
    if too_long:
        longest = max(too_long, key=lambda index: too_long[index])
        logger.warning(
            "dataset.overlongPrompts is %s: %d of %d rows for this rank have more than %d tokens; the longest, row %d, "
            "has %d",
            limit.action,
            len(too_long),
            len(seen),
            limit.max_tokens,
            longest,
            too_long[longest],
        )
