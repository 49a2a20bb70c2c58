"""When an evaluation is due, its problems and its metrics; the best one, and the early end of a run."""

import math
from contextlib import nullcontext

import pytest
from pydantic import ValidationError

from grpo_spec.errors import ConfigError
from grpo_spec.evaluation import EvaluationConfig
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.tool_schemas import ToolSchemas
from grpo_workload.rewards.table import tabulate
from grpo_workload.training.evaluation import SEED, is_due, is_due_at_start, load_evaluation
from grpo_workload.training.standing import standing
from grpo_workload.training.step_metrics import summarise_evaluation
from support.trainer.places import config_of
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

GYM = {"reasoningGym": {"dataset": "basic_arithmetic", "size": 50}}


def make_config(evaluation=None, **training):
    return config_of(
        dataset=GYM,
        rewards=[{"name": "right", "reasoningGym": {}}],
        generation={"maxModelLen": 4096},
        training=training,
        evaluation={"dataset": GYM, "everySteps": 10} | (evaluation or {}),
    )


def run(config, *, start=0, past=None):
    """Return the steps at which a run evaluates that begins at `start`, with these evaluations behind it."""
    done = dict(past or {})
    if is_due_at_start(config, done, start):
        done[start] = {}
    length = config.training.steps_per_push
    for end in range(start + length, config.training.max_steps + length, length):
        step = min(end, config.training.max_steps)
        if is_due(config, done, step, end - length):
            done[step] = {}
    return [step for step in done if step not in (past or {})]


def test_it_is_due_at_the_start_every_so_many_steps_and_at_the_end():
    assert run(make_config(max_steps=25)) == [0, 10, 20, 25]
    assert run(make_config({"atStart": False}, max_steps=20)) == [10, 20]
    assert run(make_config(max_steps=26, stepsPerGeneration=4)) == [0, 12, 20, 26], "after that generation"


def test_a_run_that_goes_on_makes_what_a_stop_left_out_and_nothing_twice():
    config = make_config(max_steps=25)
    assert run(config, start=10, past={0: {}}) == [10, 20, 25]
    assert run(config, start=10, past={0: {}, 10: {}}) == [20, 25]
    assert run(config, start=13, past={0: {}, 10: {}}) == [20, 25]
    assert run(config, start=25, past={0: {}, 10: {}, 20: {}}) == [25]
    assert run(config, start=13) == [13, 20, 25], "another run's checkpoint is the start of this one"
    assert run(make_config({"atStart": False}, max_steps=25), start=10) == [10, 20, 25]


def test_ranks_share_the_same_problems_and_none_of_them_is_trained_on():
    config = make_config({"maxPrompts": 7})
    tokenizer = make_tiny_tokenizer(template=None)
    whole, *parts = [
        load_evaluation(config, tokenizer, [], {}, rank=rank, world_size=size)
        for size, rank in [(1, 0), (9, 0), *((2, rank) for rank in range(2))]
    ]
    assert len(parts[0].prompts) == 1
    assert [prompt for part in parts[1:] for prompt in part.prompts] == whole.prompts
    assert len({prompt.index for prompt in whole.prompts}) == len({prompt.seed for prompt in whole.prompts}) == 7
    trained = load_prompts(config.dataset, tokenizer, seed=config.training.seed)
    assert not {prompt.text for prompt in whole.prompts} & {prompt.text for prompt in trained.batch(0, 50)}
    assert whole.prompts[0].seed == load_prompts(config.dataset, tokenizer, seed=SEED).batch(0, 1)[0].seed


def test_problems_show_the_tools():
    tokenizer = make_tiny_tokenizer(template=TOOL_TEMPLATE)
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    tools = ToolSchemas(tools=[schema])
    evaluation = load_evaluation(make_config({"maxPrompts": 1}), tokenizer, [], {}, rank=0, world_size=1, tools=tools)
    assert '"name": "add"' in tokenizer.decode(evaluation.prompts[0].token_ids)


def test_rewards_of_the_job_unless_it_has_its_own():
    own = {"rewards": [{"name": "ended", "stopped": {}}]}
    assert [one.name for one in make_config().evaluation_rewards] == ["right"]
    assert [one.name for one in make_config(own).evaluation_rewards] == ["ended"]


def test_metrics_of_an_evaluation():
    table = tabulate({"a": 1.0, "b": 0.5}, [[1.0, 0.0, 0.0, 0.0], [None, 1.0, None, None]])
    metrics = summarise_evaluation(
        table, num_generations=2, completion_lengths=[1, 2, 3, 4], truncated=[False, False, False, True]
    )
    assert metrics == {
        "eval/reward": 0.375,
        "eval/reward_std": pytest.approx(0.4787, abs=1e-4),
        "eval/rewards/a/mean": 0.25,
        "eval/rewards/a/std": 0.5,
        "eval/rewards/a/unscored": 0.0,
        "eval/rewards/a/best@2": 0.5,
        "eval/rewards/a/pass@1": 0.25,
        "eval/rewards/a/pass@2": 0.5,
        "eval/rewards/b/mean": 1.0,
        "eval/rewards/b/std": pytest.approx(float("nan"), nan_ok=True),
        "eval/rewards/b/unscored": 0.75,
        "eval/rewards/b/best@2": 1.0,
        "eval/rewards/b/pass@1": 0.5,
        "eval/rewards/b/pass@2": 1.0,
        "eval/num_prompts": 2.0,
        "eval/completions/mean_length": 2.5,
        "eval/completions/clipped_ratio": 0.25,
    }


def test_rows_that_are_trained_on_are_refused():
    for other, is_same in [({}, True), ({"split": "test"}, False), ({"promptTemplate": "{prompt}!"}, True)]:
        evaluation = {"dataset": {"name": "d", "split": "train", "shuffle": True} | other, "everySteps": 1}
        with pytest.raises(ValidationError, match="the same rows as dataset") if is_same else nullcontext():
            config_of(evaluation=evaluation)


def after(*values, **settings):
    """Return the standing after evaluations with these values, 10 steps apart."""
    gym = {"reasoningGym": {"dataset": "basic_arithmetic"}}
    section = EvaluationConfig.model_validate({"dataset": gym, "everySteps": 10} | settings)
    return standing(section, {10 * number: {"eval/reward": value} for number, value in enumerate(values)})


def test_the_first_of_the_best_values_counts():
    assert after() is None
    found = after(0.1, 0.5, 0.5, 0.2)
    assert (found.best_step, found.best, found.step, found.value) == (10, 0.5, 30, 0.2)
    lowest = after(0.1, 0.5, greaterIsBetter=False)
    assert lowest.best_step == 0


def test_what_has_no_value_is_not_the_best():
    found, unknown = after(math.nan, -1.0, math.nan), after(math.nan, earlyStoppingPatience=1)
    assert (found.best_step, found.progress().value) == (10, None)
    assert (unknown.best_step, unknown.progress().best, unknown.stops) == (None, None, False)


def test_the_best_is_saved_unless_it_shall_not_be():
    better, worse, unsaved = after(0.1, 0.5), after(0.5, 0.1), after(0.1, 0.5, saveBest=False)
    assert [one and one.saves(10) for one in (better, worse, unsaved)] == [True, False, False]


@pytest.mark.parametrize(("values", "stops"), [((1, 2, 1), False), ((2, 1, 2), True), ((2, 1, 3), False)])
def test_it_ends_after_so_many_evaluations_without_a_better_one(values, stops):
    found, patient = after(*values, earlyStoppingPatience=2), after(*values)
    assert (found.stops, patient.stops) == (stops, False)


def test_an_unknown_metric_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="metricForBestModel: there is no metric eval/right; there are eval/reward"):
        after(0.1, metricForBestModel="eval/right")
