"""`Run`: everything that the training loop works with on one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_spec.evaluation import EvaluationConfig
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.origin import DataOrigin
from grpo_workload.data.prefetch import PromptLoader
from grpo_workload.environments.sessions import RankSessions
from grpo_workload.generation.base import Generator
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.pulse import Pulse
from grpo_workload.reporting.gpu_monitor import Monitor
from grpo_workload.reporting.run_report import Report
from grpo_workload.rewards.scoring import Reward
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.exports import Exports
from grpo_workload.storage.group_record import Group, Place
from grpo_workload.storage.journal import Journal
from grpo_workload.storage.model_card import model_card
from grpo_workload.training.standing import Standing, standing
from grpo_workload.training.weight_check import WeightCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunBatch:
    """One rank's prompts of a batch, and what is known of them."""

    batch: int
    step: int  # the first step that trains on it
    prompts: dict[int, Prompt]  # by slot: see `algorithm/resample.py`
    known: dict[int, Group]  # groups that the journal already has, by slot
    num_overlong: int  # prompts of all ranks whose rows were too long: cut, or replaced by other rows

    @property
    def missing(self) -> dict[int, Prompt]:
        """Prompts whose completions are sampled, by slot."""
        return {slot: prompt for slot, prompt in self.prompts.items() if slot not in self.known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One rank's part of the evaluations."""

    config: EvaluationConfig
    prompts: list[Prompt]
    rewards: list[Reward]
    data: DataOrigin
    past: dict[int, Mapping[str, float]]  # metrics by number of steps, the same on every rank; `evaluate` adds to it


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the training loop works with on one rank; `assemble.load` makes it."""

    config: TrainerConfig
    rank: int
    world_size: int
    share: range  # positions of this rank's prompts among those of a step
    processing_class: Any  # TRL's word for the tokenizer or, of a vision-language model, the processor that has it
    prompts: PromptLoader
    rewards: list[Reward]
    evaluation: Evaluation | None
    policy: Policy
    generator: Generator
    weight_check: WeightCheck
    checkpoints: Checkpoints
    exports: Exports | None
    name: str  # the job's
    journal: Journal
    known: dict[Place, Group]  # groups of the first generation that the journal already has under these weights
    start: SavedState
    report: Report
    monitor: Monitor
    pulse: Pulse
    event_loop: asyncio.Runner  # one for all steps, so that async rewards can keep connections open
    sessions: RankSessions | None = None  # tools and environments
    begun: dict[int, BegunBatch] = field(default_factory=dict)  # batches of which completions are being sampled

    def card(self, step: int, metrics: Mapping[str, float], *, has_adapters: bool) -> str:
        """Return the card of the model, or of adapters, after `step` steps, the last of which has `metrics`."""
        evaluated = self.evaluation.past.get(step, {}) if self.evaluation else {}
        return model_card(self.config, self.name, step, metrics, evaluated, has_adapters=has_adapters)

    def standing(self) -> Standing | None:
        """Return which evaluation is the best so far; None before the first."""
        return None if self.evaluation is None else standing(self.evaluation.config, self.evaluation.past)
