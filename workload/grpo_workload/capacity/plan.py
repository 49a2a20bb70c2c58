"""Whether a job fits on GPUs of a known size: the tightest place of each of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_spec.contract import Contract
from grpo_spec.generation import Topology
from grpo_workload.capacity.parts import DOUBT, TRAIN, Parts, Trainers, engine_phases
from grpo_workload.capacity.shapes import Models, planned_tokens
from grpo_workload.policy.memory.spare import SPARE


@dataclass(slots=True)
class Place:
    """One GPU, or with `is_host` one pod's host memory: the tightest of its group."""

    name: str
    phases: dict[str, Parts]
    limit: int | None  # bytes that it has; None: not known
    is_host: bool = False
    engine_over: int = 0  # bytes that vLLM's share of the GPU lacks for its weights and one sequence

    def total(self, phase: str) -> int:
        """Bytes in a phase."""
        return sum(self.phases[phase].values())

    @property
    def worst(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes in that phase."""
        return self.total(self.worst)

    @property
    def over(self) -> int:
        """Bytes that it lacks; at most 0 if it fits."""
        over = 0 if self.limit is None else self.peak - self.limit
        return max(over, self.engine_over or over)

    @property
    def is_hopeless(self) -> bool:
        """Whether it lacks more than a plan may be wrong by. What its share is too small for, vLLM says itself."""
        return self.limit is not None and self.peak - self.engine_over > (1 + DOUBT) * self.limit


@dataclass(slots=True)
class Plan:
    """All places of a job."""

    tokens: int  # of the micro-batch that was planned
    chosen_tokens: int  # of the largest micro-batch that fits
    places: list[Place] = field(default_factory=list)
    unknown: str | None = None  # why activations are left out

    @property
    def gpus(self) -> list[Place]:
        """Those that are GPUs."""
        return [place for place in self.places if not place.is_host]

    @property
    def tightest(self) -> Place:
        """The place that lacks most, or has least to spare."""
        return max(self.places, key=lambda place: (place.over, place.peak))

    @property
    def fits(self) -> bool:
        """Whether no place lacks memory."""
        return self.tightest.over <= 0

    @property
    def is_safe(self) -> bool:
        """Whether it fits with room for fragments on the GPUs that train; vLLM allocates its cache once."""
        trains = (place for place in self.gpus if TRAIN in place.phases)
        return self.fits and all(place.peak <= (1 - SPARE) * place.limit for place in trains if place.limit)


def plan(
    contract: Contract,
    gpu_bytes: int,
    models: Models,
    *,
    engine_bytes: int | None = None,
    host_bytes: Mapping[str, int] | None = None,
) -> Plan:
    """Plan a job. ConfigError if its model's configuration cannot be used.

    Args:
        contract: the job.
        gpu_bytes: memory of the GPUs of trainer pods.
        models: made for this plan, or for earlier ones.
        engine_bytes: memory of the GPUs of engine pods; without it, these are left out.
        host_bytes: memory limits of pods, by group, where there are any.
    """
    shapes = models.shapes(contract.config)
    tokens = planned_tokens(contract, shapes)
    trainers = Trainers(contract, gpu_bytes, models, shapes)
    made, limits = Plan(tokens, tokens), host_bytes or {}
    generation = contract.config.generation
    for number, member in enumerate(contract.members):
        if any(member.group == earlier.group for earlier in contract.members[:number]):
            continue  # the first pod of a group is its tightest
        sends = number == 0 or generation.topology is Topology.NODE_LOCAL
        made.places.append(
            Place(
                f"rank {member.rank_offset} ({member.pod})",
                trainers.phases(tokens, sends=sends),
                gpu_bytes,
                engine_over=trainers.engine.over if trainers.engine else 0,
            )
        )
        host = trainers.host(member.gpus, is_first=number == 0)
        made.places.append(Place(member.pod, host, limits.get(member.group), is_host=True))
    own = gpu_bytes if generation.topology is Topology.NODE_LOCAL else engine_bytes
    kinds = {(engine.group, engine.tensor_parallel): engine for engine in reversed(contract.engines)}
    if own is not None:
        for engine in reversed(kinds.values()):
            phases, over = engine_phases(contract, engine, own, shapes)
            made.places.append(Place(f"engine {engine.name}", phases, own, engine_over=over))
    made.chosen_tokens = trainers.largest(tokens)
    made.unknown = models.unknown if models.activations(contract, tokens) is None else None
    return made
