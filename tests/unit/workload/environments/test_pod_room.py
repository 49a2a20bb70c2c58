"""Ranks that keep sessions for later steps must leave one for the episodes that others wait for."""

import pytest

from grpo_spec.errors import ConfigError
from grpo_spec.schema import WITHOUT_RULES
from grpo_spec.trainer import TrainerConfig
from grpo_workload.environments.pods.room import check_room
from support.trainer.agents import COUNTER, make_config
from support.trainer.environment_pods import contract_of


def contract(sessions, *, topology="Colocate", max_staleness=2, environments=(COUNTER,)):
    """Return one with two pods, whose job has four prompts of eight completions a step."""
    values = make_config("add", environments=environments).model_dump(mode="json", by_alias=True, exclude_none=True)
    values["training"] |= {"maxStaleness": max_staleness, "promptsPerStep": 4, "numGenerations": 8}
    values["generation"]["topology"] = topology
    config = TrainerConfig.model_validate(values, context=WITHOUT_RULES)
    names = [one["name"] for one in environments]
    groups = [{"name": "a", "sessions": sessions, "environments": names, "addresses": ["a:1", "b:1"]}]
    return contract_of(config, groups=groups)


def test_sessions_for_later_steps_and_one_more_are_needed_in_colocate():
    for environments in ((COUNTER,), ()):
        with pytest.raises(
            ConfigError, match=r"groups\[a\]: 64 sessions are too few: with .*maxStaleness 2, 64 episodes of .* than 64"
        ):
            check_room(contract(32, environments=environments))
        check_room(contract(33, environments=environments))
    check_room(contract(1, max_staleness=0))
    check_room(contract(1, topology="Server"))
