"""Objects that count as the values of completions, and functions that can take the arguments of TRL's calls."""

import functools
from collections import Counter, deque
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas
import pytest
import torch

from grpo_workload.algorithm.samples import Episode
from grpo_workload.rewards.trl_signature import Logged, ReturnedError, TrainerState, as_values, misfit, trl_arguments
from support.trainer.reward_inputs import make_completion, make_prompt

INFINITE = float("inf")


def wrapped(function):
    @functools.wraps(function)
    def alone(completions, **others):
        return function(completions)

    return alone


async def yields():
    yield 1.0


@pytest.mark.parametrize(
    ("result", "values"),
    [
        ([0.5, None], [0.5, None]),
        ((True, np.bool_(False)), [1.0, 0.0]),
        (deque([1, Decimal("0.5")]), [1.0, 0.5]),
        ([Fraction(1, 2), np.float16(0.5)], [0.5, 0.5]),
        ((value for value in (1, 2)), [1.0, 2.0]),
        (range(2), [0.0, 1.0]),
        ({"a": 1, "b": 2}.values(), [1.0, 2.0]),
        (np.array([1.0, 2.0], dtype=np.float32), [1.0, 2.0]),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [1.0, 2.0]),
        ([torch.tensor(1.0), np.array(2)], [1.0, 2.0]),
        (pandas.Series([1.0, 2.0], index=[7, 3]), [1.0, 2.0]),
        ([10**400, Fraction(-(10**400))], [INFINITE, -INFINITE]),
    ],
)
def test_what_is_a_number_for_each_of_two_completions(result, values):
    assert as_values(result, 2) == values


@pytest.mark.parametrize(
    ("result", "message", "completion"),
    [
        ("11", "returned '11' (str), not a list", None),
        (b"11", "returned b'11' (bytes), not a list", None),
        (None, "returned None (NoneType), not a list", None),
        (1.0, "returned 1.0 (float), not a list", None),
        ({0: 1.0, 1: 0.5}, "returned {0: 1.0, 1: 0.5} (dict), not a list", None),
        (Counter("ab"), "(Counter), not a list", None),
        ({1.0, 0.5}, "(set), not a list", None),
        (yields(), "(async_generator), not a list", None),
        (np.array(1.0), "returned a ndarray of shape (), not (2,)", None),
        (np.ones((2, 1)), "returned a ndarray of shape (2, 1), not (2,)", None),
        (torch.ones(1, 2), "returned a Tensor of shape (1, 2), not (2,)", None),
        (pandas.DataFrame([[1, 2], [3, 4]]), "returned a DataFrame of shape (2, 2), not (2,)", None),
        ([1.0], "returned 1 value for 2 completions", None),
        (iter([1.0] * 3), "returned 3 values for 2 completions", None),
        ([1.0, "0.5"], "returned '0.5' (str) for completion 1 of 2", 1),
        (np.array(["1", "2"]), "(str_) for completion 0 of 2", 0),
        ([1.0, b"1"], "returned b'1' (bytes) for completion 1 of 2", 1),
        ([1 + 0j, 1.0], "returned (1+0j) (complex) for completion 0 of 2", 0),
        (np.ones(2, dtype=np.complex64), "(complex64) for completion 0 of 2", 0),
        (torch.tensor([1j, 1j]), "(Tensor) for completion 0 of 2", 0),
        ([[1.0], [2.0]], "returned [1.0] (list) for completion 0 of 2", 0),
        ([torch.ones(2), 1.0], "(Tensor) for completion 0 of 2", 0),
        ([1.0, pandas.NA], "returned <NA> (NAType) for completion 1 of 2", 1),
    ],
)
def test_what_is_not_names_the_completion_that_is_to_blame(result, message, completion):
    with pytest.raises(ReturnedError) as error:
        as_values(result, 2)
    assert message in str(error.value)
    assert error.value.completion == completion


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda prompts, completions, **columns: [], None),
        (lambda *, completions, gold, **columns: [], None),
        (lambda gold=3, **columns: [], None),
        (max, None),
        (wrapped(lambda completions: []), None),
        (functools.partial(lambda other, **columns: [], 1), None),
        (lambda prompts, completions: [], "got an unexpected keyword argument 'completion_ids'"),
        (lambda completions, solution, **columns: [], "missing a required argument: 'solution'"),
        (lambda completions, /, **columns: [], "'completions'"),
    ],
)
def test_a_function_fits_if_python_could_call_it(function, says):
    found = misfit(function, {}, ["gold"])
    assert found is None if says is None else says in found


def test_settings_of_a_function_hide_no_argument():
    function = lambda **columns: []  # noqa: E731
    assert misfit(function, {"limit": 3}, ["gold"]) is None
    assert "gold in `params` has the name of a column of the dataset" in misfit(function, {"gold": 3}, ["gold"])
    assert "prompts in `params` has the name of an argument of every" in misfit(function, {"prompts": 3}, ["gold"])


def test_what_is_logged_can_be_written_as_json():
    logged = Logged(4)
    logged.log_extra("note", [1, 2**70, float("nan"), "cut \ud83d"])
    assert logged.extra == {"note": [1, str(2**70), "nan", "cut ?"]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ([{"role": "user", "content": "Play."}], [{"role": "user", "content": "Play. A wall."}]),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " A wall."}]}],
        ),
    ],
)
def test_of_an_episode_functions_get_all_turns_all_tokens_and_what_the_environment_showed(text, shown):
    """TRL puts what `reset` returned behind the last message."""
    turns = [{"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "name": "go", "content": "x"}]
    episode = Episode(messages=tuple(turns), context=((1, 2),), observation=" A wall.")
    given = trl_arguments([make_prompt(text)], [replace(make_completion("no"), episode=episode)], TrainerState())
    assert (given["prompts"], given["completions"], given["completion_ids"]) == ([shown], [turns], [[7, 8]])
    assert "environments" not in given


def needs(completions, environments, **others): ...


def may_have(completions, environments=None, **others): ...


def takes_others(completions, **others): ...


def test_environments_are_an_argument_in_jobs_that_have_them_alone():
    assert misfit(needs, {}, [], has_environments=True) is None
    assert "this job has none" in misfit(needs, {}, [])
    assert misfit(may_have, {}, []) is None
    assert "`params` has the name of an argument" in misfit(may_have, {"environments": 1}, [], has_environments=True)
    assert misfit(takes_others, {"environments": 1}, [], has_environments=True) is None
