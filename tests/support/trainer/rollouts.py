"""Parts of a run for a rollout: prompts, a generator that samples nothing, rewards and a journal, on one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from grpo_spec.environments import EpisodesConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.base import SILENCE, Listener
from grpo_workload.ranks.clock import Clock
from grpo_workload.ranks.seeds import prompt_seed
from grpo_workload.rewards.scorer import Function
from grpo_workload.rewards.scoring import Reward
from grpo_workload.storage.journal import Journal, begin_branch
from grpo_workload.training.rollout import Generation, roll_out
from grpo_workload.training.run import Run
from support.trainer.samples import make_completion

SHARE = range(2)


class Prompts:
    """A loader that gives a step's prompts once, in order."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, step: int) -> list[Prompt]:
        assert step == self._next
        self._next += 1
        return [
            Prompt(index=10 * step + place, text="", token_ids=(step, place), seed=prompt_seed(0, step, place))
            for place in SHARE
        ]


class Sampled:
    """A generator that samples a prompt with the weights that it has when the prompt begins."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.begun: dict[int, int] = {}  # version by the prompt's row

    def begin(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE) -> None:
        for prompt in prompts:
            self.begun.setdefault(prompt.index, self.version)

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        self.begin(prompts, num_generations, listener)
        return [[_completion(self.begun[one.index])] * num_generations for one in prompts]

    def sleep(self) -> None: ...


def _completion(version: int) -> Completion:
    routed = np.ones((2, 1, 1), np.uint8)
    return make_completion((1,), text="a", weight_version=version, routed_experts=routed)


def make_run(
    folder: Path,
    generator: Sampled,
    *,
    first: int = 0,
    batch: int | None = None,
    known: Any = (),
    parts: dict[str, Any] | None = None,
    episodes: EpisodesConfig | None = None,
    **training: Any,
) -> Run:
    """Return what a rollout needs of a run of 5 steps, which begins at step `first` and at `batch`.

    `parts` replace parts of the run, such as `rewards`; `episodes` are given for a job with tools or environments.
    """
    settings = {"max_steps": 5, "num_generations": 2, "prompts_per_step": len(SHARE)} | training
    dataset = SimpleNamespace(overlong_prompts="error")
    config = SimpleNamespace(
        training=TrainingConfig(**settings),
        dataset=dataset,
        has_episodes=episodes is not None,
        episodes=episodes,
    )
    report = SimpleNamespace(phase=lambda _: None)
    one = Reward(name="one", weight=1.0, scorer=Function(lambda prompts, completions: [1.0] * len(completions)))
    run: dict[str, Any] = {name: None for name in Run.__dataclass_fields__} | {"begun": {}, "share": SHARE}
    run |= {"config": config, "report": report, "rewards": [one], "generator": generator}
    run["prompts"] = Prompts(first if batch is None else batch)
    run |= {"pulse": SimpleNamespace(meet=lambda: None, beat=lambda: None), "event_loop": asyncio.Runner()}
    run |= {"known": {group.place: group for group in known}, "start": SimpleNamespace(step=first)}
    run |= {"rank": 0, "world_size": 1} | (parts or {})
    if run["journal"] is None:
        run["journal"] = Journal(folder, begin_branch(folder, attempt=0, step=first)[0], run["rank"])
    return Run(**run)


def roll(folder: Path, generator: Sampled, **settings: Any) -> Generation:
    """Return the first generation of a run with these settings of `make_run`, whose journal is closed then."""
    run = make_run(folder, generator, **settings)
    try:
        return roll_out(run, 0, Clock())
    finally:
        run.journal.close()
