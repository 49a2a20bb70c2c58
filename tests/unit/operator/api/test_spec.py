"""A spec that is refused: the error names the field, what is wrong with it, and what would work."""

import re

import pytest

from grpo_operator.api.spec import parse_spec
from support.control_plane.jobs import refusals, spec
from support.control_plane.refused_by_rules import RULES
from support.control_plane.refused_episodes import ACCEPTED, REFUSED

WRONG = refusals(
    """\
{training: {numGenerations: 1}}
    spec.training.numGenerations: Input should be greater than or equal to 2 (found 1)
{lora: {r: 0}}
    spec.lora.r: Input should be greater than or equal to 1
{lora: {dropout: 1}}
    spec.lora.dropout: Input should be less than 1
{rewards: [{name: r, accuracy: {}, timeoutSeconds: 601}]}
    spec: rewards[].timeoutSeconds must be at most rendezvous.timeoutSeconds
{trainer: {groups: [{name: A, gpus: 1}]}}
    spec.trainer.groups[0].name: String should match pattern
{trainer: {groups: [{name: a, gpu: 1}]}}
    spec.trainer.groups[0].gpu: unknown field; did you mean gpus?
{generation: {server: {groups: [{tensor_paralel: 1}]}}}
    spec.generation.server.groups[0].tensor_paralel: unknown field; did you mean tensorParallel?
{quux: 1}
    spec.quux: unknown field
{training: {numTrainEpochs: 3}}
    spec.training.numTrainEpochs: unknown field; jobs count steps: maxSteps = epochs x rows / promptsPerStep
{rewards: [{name: r, function: my_rewards.correct}]}
    spec.rewards[0].function: write module:function; did you mean my_rewards:correct?
{rewards: [{name: r, format: {pattern: "(a"}}]}
    spec.rewards[0].format.pattern: is no regular expression of Python: missing ), unterminated subpattern at
    position 0 (found '(a')
{rewards: [{name: r, exactMatch: {extract: "(a)(b)"}}]}
    spec.rewards[0].exactMatch.extract: has 2 groups; 1 would work
{rewards: [{name: r, accuracy: {}}, {name: r, stopped: {}}]}
    spec: rewards has name 'r' twice
{podTemplate: {env: [{name: MINE}, {name: WORLD_SIZE}]}}
    spec.podTemplate.env[1]: the operator and the launcher set this variable
{trainer: {groups: [{name: g, gpus: 1, podTemplate: {env: [{name: POD_UID, valueFrom: {}}]}}]}}
    spec.trainer.groups[0].podTemplate.env[0]: the operator and the launcher set this variable
{generation: {topology: Server, server: {groups: [{name: g, gpus: 1, podTemplate: {env: [{name: GRPO_ATTEMPT}]}}]}}}
    spec.generation.server.groups[0].podTemplate.env[0]: the operator and the launcher set this variable
"""
)


@pytest.mark.parametrize(("change", "fault"), WRONG)
def test_an_error_names_the_field(change: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_spec(spec(**change))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        *RULES,
        *REFUSED,
        ({"tools": [{"function": "a:f"}] * 2}, "tools has function 'a:f' twice"),
        ({"environments": [{"name": "e", "factory": "m:E"}] * 2}, "environments has name 'e' twice"),
        ({"environmentPods": {"groups": [{"name": "g", "environments": ["e", "e"]}]}}, "environments has 'e' twice"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_message(change: dict, fault: str) -> None:
    """By the API server as well: tests/api/test_crd.py."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_spec(spec(**change))


@pytest.mark.parametrize("change", ACCEPTED)
def test_tools_and_environments_are_accepted(change: dict) -> None:
    assert parse_spec(spec(**change)).has_episodes


def test_a_list_whose_only_item_is_wrong_is_not_called_empty() -> None:
    with pytest.raises(ValueError, match=r"write module:function$") as error:
        parse_spec(spec(rewards=[{"name": "r", "function": "no_module"}]))
    assert str(error.value).count("spec.rewards") == 1
