"""Begins the batches of a generation: this rank's prompts, and what the journal has of their groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_maker import PromptError
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.collectives import gather
from grpo_workload.rewards.scoring import begin_scoring
from grpo_workload.storage.group_record import Group
from grpo_workload.training.run import BegunBatch, Run


class ScoringListener:
    """Begins to score what is sampled, and tells the other ranks that this one makes progress."""

    def __init__(self, run: Run, prompts: Sequence[Prompt]) -> None:
        self._rewards, self._prompts = run.rewards, prompts
        self.moved, self.meet = run.pulse.beat, run.pulse.meet

    def finished(self, position: int, completions: Sequence[Completion]) -> None:
        """See `Listener.finished`."""
        begin_scoring(self._rewards, self._prompts[position], completions)


def begin(run: Run, batch: int, step: int, clock: Clock) -> BegunBatch:
    """Take this rank's prompts of a batch, on which `step` is the first to train; collective.

    With `maxStaleness`, they also begin to be sampled: the step may be some steps ahead.
    """
    taken, num_overlong = take_prompts(run, partial(run.prompts.take, batch), clock)
    prompts = dict(zip(run.share, taken, strict=True))
    journalled = [group for position in run.share if (group := run.known.get((step, position)))]
    known = {one.slot: one for one in journalled if one.slot in prompts and _fits(run, one, prompts[one.slot])}
    if replaced := _replaced(run, step):
        own = [replaced[position] for position in run.share if position in replaced]
        others, more = take_prompts(run, partial(run.prompts.further, batch, [one.slot for one in own]), clock)
        num_overlong += more
        for group, prompt in zip(own, others, strict=True):
            if _fits(run, group, prompt):
                del prompts[group.position]
                prompts[group.slot], known[group.slot] = prompt, group
    begun = BegunBatch(batch=batch, step=step, prompts=prompts, known=known, num_overlong=num_overlong)
    if run.config.training.max_staleness:
        asked = list(begun.missing.values())
        run.generator.begin(asked, run.config.training.num_generations, ScoringListener(run, asked))
    return begun


def take_prompts(run: Run, take: Callable[[], list[Prompt]], clock: Clock) -> tuple[list[Prompt], int]:
    """Return this rank's prompts, and the number of all ranks' prompts whose rows were too long; collective.

    If any rank has one that cannot be used, all ranks raise PromptError.
    """
    prompts, complaint = [], None
    try:
        prompts = take()
    except PromptError as error:
        complaint = str(error)
    clock.lap("prompts")
    gathered = gather((complaint, sum(prompt.is_overlong for prompt in prompts)))
    complaints = [one for one, _ in gathered if one is not None]
    clock.lap("gather")
    if complaints:
        raise PromptError(complaints[0])
    return prompts, sum(count for _, count in gathered)


def _fits(run: Run, group: Group, prompt: Prompt) -> bool:
    """Whether a group from the journal is of this prompt, and fits the current settings.

    With `routerReplay` none does: the journal would be many times as large with the experts.
    """
    return (
        not run.config.training.router_replay
        and group.prompt_ids == prompt.token_ids
        and len(group.completions) == run.config.training.num_generations
        and set(group.rewards) == {reward.name for reward in run.rewards}
    )


def _replaced(run: Run, step: int) -> dict[int, Group]:
    """Return the groups, by position, that the journal has in place of a batch's own.

    There are none unless it has the whole batch, each group once: an attempt that was killed while it wrote chose among
    other groups than the next one will.
    """
    num_prompts = run.config.training.prompts_per_step
    found = [group for position in range(num_prompts) if (group := run.known.get((step, position)))]
    is_whole = len({group.slot for group in found}) == num_prompts
    is_asked = run.config.training.max_resample_times > 0
    return {group.position: group for group in found if group.slot != group.position} if is_whole and is_asked else {}
