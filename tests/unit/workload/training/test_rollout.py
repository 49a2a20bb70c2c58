"""The prompts that a step trains on, the time they begin to be sampled, and the steps that share a generation."""

import dataclasses
import math
import statistics

import pytest
import torch

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.reuse import batch_of, batches_from
from grpo_workload.ranks.clock import Clock
from grpo_workload.rewards.scorer import Function, RewardError
from grpo_workload.rewards.scoring import Reward
from grpo_workload.storage.journal import begin_branch, read_lineage
from grpo_workload.training.rollout import roll_out
from support.trainer.rollouts import SHARE, Sampled, make_run, roll

pytestmark = pytest.mark.usefixtures("only_rank")


def rows(rollout):
    return [sample.prompt.index for sample in rollout.samples]


@pytest.mark.parametrize("staleness", [0, 1, 2, 7])
def test_a_step_trains_on_its_own_prompts_and_no_token_is_older_than_allowed(tmp_path, staleness):
    generator = Sampled()
    run = make_run(tmp_path, generator, max_staleness=staleness)
    for step in range(5):
        rollout = roll_out(run, step, Clock()).rollouts[step]
        assert rows(rollout) == [10 * step, 10 * step, 10 * step + 1, 10 * step + 1]
        ages = {fact.staleness for facts in rollout.facts for fact in facts}
        assert ages == {min(step, staleness)}, "it began as early as allowed"
        ahead = [10 * number + place for number in range(min(step + staleness + 1, 5)) for place in SHARE]
        assert list(generator.begun) == ahead, "in the order of the steps, and nothing beyond the last one"
        generator.version = step + 1
    assert not run.begun


def test_a_resumed_run_samples_no_group_again_that_was_journalled_although_it_began_earlier(tmp_path):
    run = make_run(tmp_path, generator := Sampled(), max_staleness=2)
    for step in range(3):
        roll_out(run, step, Clock())
        run.journal.settle()
        if step == 1:
            run.journal.begin_part()  # the checkpoint of step 2
        generator.version = step + 1
    run.journal.close()

    _, known = begin_branch(tmp_path, attempt=1, step=2)
    assert [group.weight_versions for group in known] == [{0}, {0}]
    resumed = make_run(tmp_path, again := Sampled(version=2), first=2, known=known, max_staleness=2)
    rollout = roll_out(resumed, 2, Clock()).rollouts[2]
    assert rows(rollout) == [20, 20, 21, 21]
    assert {fact.staleness for facts in rollout.facts for fact in facts} == {2}
    assert sorted(again.begun) == [30, 31, 40, 41]
    resumed.journal.close()


def test_with_router_replay_a_resumed_run_samples_again_what_the_journal_has_without_experts(tmp_path):
    first = roll(tmp_path, Sampled(), router_replay=True).rollouts[0]
    _, known = begin_branch(tmp_path, attempt=1, step=0)
    assert len(known) == len(SHARE)
    again = roll(tmp_path, generator := Sampled(), known=known, router_replay=True).rollouts[0]
    assert rows(again) == rows(first)
    assert list(generator.begun) == [0, 1]


def named(*names):
    return {"rewards": [Reward(name=one, weight=1.0, scorer=Function(lambda *_: [1.0] * 4)) for one in names]}


@pytest.mark.parametrize(
    ("group", "job", "rows_again"),
    [
        ({}, {}, []),
        ({"prompt_ids": (0, 2)}, {}, [1]),  # another dataset, or another chat template
        ({}, {"num_generations": 3}, [0, 1]),
        ({}, {"parts": named("other")}, [0, 1]),
        ({}, {"parts": named("one", "other")}, [0, 1]),  # in addition
        ({"rewards": {"one": [1.0] * 2, "other": [1.0] * 2}}, {}, [1]),  # which the job has no more
    ],
)
def test_a_journalled_group_is_used_again_only_where_it_is_what_the_job_would_sample(tmp_path, group, job, rows_again):
    roll(tmp_path, Sampled())
    _, (first, last) = begin_branch(tmp_path, attempt=1, step=0)
    known = (first, dataclasses.replace(last, **group))
    rollout = roll(tmp_path, again := Sampled(), known=known, **job).rollouts[0]
    assert list(again.begun) == rows_again
    num_generations = job.get("num_generations", 2)
    assert rows(rollout) == [0] * num_generations + [1] * num_generations
    assert {sample.prompt.token_ids for sample in rollout.samples} == {(0, 0), (0, 1)}


def test_an_attempt_whose_reward_fails_journals_nothing_and_the_next_asks_it_of_missing_groups_alone(tmp_path):
    asked = []

    def scores(prompts, completions):
        asked.append(len(completions))
        return [1.0 / (len(asked) - 1)] * len(completions)

    parts = {"rewards": [Reward(name="one", weight=1.0, scorer=Function(scores))]}
    run = make_run(tmp_path, Sampled(), parts=parts)
    with pytest.raises(RewardError, match=r"rewards\[one\] raised ZeroDivisionError"):
        roll_out(run, 0, Clock())
    run.journal.close()
    assert list(read_lineage(tmp_path)) == []
    run = make_run(tmp_path, Sampled(), parts=parts)
    roll_out(run, 0, Clock())
    run.journal.close()
    _, (first, _) = begin_branch(tmp_path, attempt=1, step=0)
    resumed = make_run(tmp_path, Sampled(), known=(first,), parts=parts)
    rollout = roll_out(resumed, 0, Clock()).rollouts[0]
    assert asked == [4, 4, 2]
    assert [sample.reward for sample in rollout.samples] == [1.0, 1.0, 0.5, 0.5]
    resumed.journal.close()


def generations(run, first=0):
    """Return the generations of a run from its step `first` to its last."""
    found = [roll_out(run, first, Clock())]
    while found[-1].steps.stop < run.config.training.max_steps:
        run.journal.settle()
        found.append(roll_out(run, found[-1].steps.stop, Clock()))
    run.journal.close()
    return found


@pytest.mark.parametrize(
    ("together", "times", "steps", "batches"),
    [
        (1, 1, [1] * 8, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (3, 1, [3, 3, 2], [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (1, 3, [3, 3, 2], [[0], [1], [2]]),
        (2, 2, [4, 4], [[0, 1], [2, 3]]),
        (3, 2, [6, 2], [[0, 1, 2], [3, 4]]),
    ],
)
def test_steps_of_a_generation_share_its_weights_and_go_through_its_batches_in_turn(
    tmp_path, together, times, steps, batches
):
    run = make_run(tmp_path, Sampled(), steps_per_generation=together, num_iterations=times, max_steps=8)
    found = generations(run)
    assert [len(one.steps) for one in found] == steps
    assert [list(one.rollouts) for one in found] == batches
    for one in found:
        trained = [batch_of(step, run.config.training) for step in one.steps]
        assert trained == (list(one.rollouts) * times)[: len(trained)], "TRL's order"
        for batch, rollout in one.rollouts.items():
            assert rows(rollout) == [10 * batch, 10 * batch, 10 * batch + 1, 10 * batch + 1]
            assert rollout.step == one.steps[trained.index(batch)]
    lines = [[(group.step, group.prompt_index) for group in groups] for groups in read_lineage(tmp_path)]
    assert lines == [
        [(rollout.step, 10 * batch), (rollout.step, 10 * batch + 1)]
        for one in found
        for batch, rollout in one.rollouts.items()
    ]


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_run_that_was_killed_in_a_generation_samples_none_of_its_groups_again(tmp_path, killed):
    settings = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
    run = make_run(tmp_path, Sampled(), **settings)
    roll_out(run, 0, Clock())
    run.journal.begin_part()  # the checkpoint of step 4
    run.generator.version = 4
    roll_out(run, 4, Clock())
    run.journal.close()
    (file,) = (tmp_path / "journal").glob("*/steps-4/*.gz")
    whole = file.read_bytes()
    second = whole.index(b"\x1f\x8b", 2)  # where the second step's groups begin
    file.write_bytes(whole[: (5, second + 5, len(whole))[killed]])

    _, known = begin_branch(tmp_path, attempt=1, step=4, count=2)
    assert [group.place for group in known] == [(4, 0), (4, 1), (5, 0), (5, 1)][: 2 * killed]
    resumed = make_run(tmp_path, again := Sampled(version=4), first=4, batch=2, known=known, **settings)
    (generation,) = generations(resumed, 4)
    assert [rows(rollout) for rollout in generation.rollouts.values()] == [[20, 20, 21, 21], [30, 30, 31, 31]]
    assert sorted(again.begun) == [20, 21, 30, 31][2 * killed :]


def test_a_run_that_begins_inside_a_generation_samples_what_the_rest_of_it_needs(tmp_path):
    settings = {"steps_per_generation": 3, "num_iterations": 2, "max_steps": 8}
    generation = generations(make_run(tmp_path, Sampled(), first=4, batch=1, **settings), 4)[0]
    assert (generation.steps, list(generation.rollouts)) == (range(4, 6), [1, 2])
    assert batches_from(4, TrainingConfig(**settings)) == range(5)


def test_deviations_are_those_of_all_that_is_sampled_together(tmp_path):
    """As in TRL, with `scaleRewards: batch`; those of groups are their own."""
    scores = iter([1.0, 0.0, 1.0, 0.0, 9.0, 1.0, 9.0, 1.0])
    reward = Reward(name="one", weight=1.0, scorer=Function(lambda prompts, _: [next(scores) for _ in prompts]))
    settings = {"steps_per_generation": 2, "scale_rewards": "batch"}
    rollouts = roll(tmp_path, Sampled(), parts={"rewards": [reward]}, **settings).rollouts
    deviation = statistics.stdev([1, 0, 1, 0, 9, 1, 9, 1]) + 1e-4
    advantages = [[fact.advantage for fact in rollout.facts[0]] for rollout in rollouts.values()]
    assert advantages == [pytest.approx([half / deviation, -half / deviation] * 2) for half in (0.5, 4.0)]


def test_kl_divergences_are_subtracted_from_rewards(tmp_path):
    """Those of a generation's batches are computed together, and are as TRL's RLOO subtracts them."""
    divergences = iter([1.0, 3.0, 0.0, 4.0, math.nan, 2.0, 5.0, 5.0])

    class Policy:
        group = None

        def divergence(self, batch, temperature):
            assert temperature == 1.0
            return torch.tensor([next(divergences) for _ in range(batch.num_sequences)])

    settings = {"steps_per_generation": 2, "kl_in_reward": True, "beta": 0.5, "scale_rewards": "none"}
    rollouts = roll(tmp_path, Sampled(), parts={"policy": Policy()}, **settings).rollouts
    facts = [rollout.facts[0] for rollout in rollouts.values()]
    assert [[fact.advantage for fact in own] for own in facts] == [[0.5, -0.5, 1, -1], [0, 0, 0, 0]]
    assert {fact.reward for own in facts for fact in own} == {1.0}, "metrics are of rewards without it"
    assert [rollout.metrics["kl"] for rollout in rollouts.values()] == [2, 4]
