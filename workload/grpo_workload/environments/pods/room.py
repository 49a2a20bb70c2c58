"""Whether environment pods have sessions for all episodes that hold one at a time. Pure."""

from __future__ import annotations

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.generation import Topology


def check_room(contract: Contract) -> None:
    """Refuse a job whose ranks could wait for each other's sessions.

    In Colocate, episodes of later steps go on only while their rank samples. A rank that trains, or waits for another,
    keeps their sessions; another one's episodes of this step need a session besides them.

    Raises:
        ConfigError: names the fields.
    """
    training = contract.config.training
    later = training.max_staleness * training.prompts_per_step * training.num_generations
    if contract.config.generation.topology is not Topology.COLOCATE or not later:
        return
    names: list[str | None] = [one.name for one in contract.config.environments]
    for name in names or [None]:
        groups = [one for one in contract.environment_pods if name is None or name in one.environments]
        room = sum(one.sessions * len(one.addresses) for one in groups)
        if room <= later:
            fields = ", ".join(f"environmentPods.groups[{one.name}]" for one in groups)
            raise ConfigError(
                f"{fields}: {room} sessions are too few: with training.maxStaleness {training.max_staleness}, {later} "
                "episodes of later steps may have one each, and ranks would wait for each other; raise replicas or "
                f"sessions to more than {later} together, or lower maxStaleness"
            )
