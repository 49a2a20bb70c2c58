"""Groups of equal rewards are replaced: the same ones on any number of ranks, and none again after a restart."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.resample import num_further, places, teaches
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prefetch import PromptLoader
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.data.shard import shard
from grpo_workload.ranks.clock import Clock
from grpo_workload.rewards.scorer import Function
from grpo_workload.rewards.scoring import Reward
from grpo_workload.storage.journal import Journal, begin_branch, read_lineage
from grpo_workload.training.rollout import roll_out
from support.trainer.rollouts import Sampled, make_run

PROMPTS, ROWS, ROUNDS = 5, 40, 3
USEFUL = frozenset(range(0, ROWS, 3))
SETTINGS = {"prompts_per_step": PROMPTS, "max_resample_times": ROUNDS}


@given(st.lists(st.booleans(), min_size=4, max_size=20))
def test_those_that_teach_are_taken_first_and_the_batch_keeps_its_own_places(useful):
    found = dict(enumerate(useful))
    chosen = places(found, 4)
    assert sorted(chosen.values()) == [0, 1, 2, 3]
    assert sum(found[slot] for slot in chosen) == min(4, sum(useful))
    assert all(at == slot for slot, at in chosen.items() if slot < 4)
    assert all(chosen[slot] == slot for slot in range(4) if found[slot])
    assert max((slot for slot in chosen if found[slot]), default=-1) <= min(
        (slot for slot in found if found[slot] and slot not in chosen), default=len(found)
    ), "the first ones that teach"


def test_as_many_are_sampled_as_the_share_of_those_that_teach_promises():
    assert num_further(dict(enumerate([True] * 8)), 8) == 0
    assert num_further(dict(enumerate([True] * 6 + [False] * 2)), 8) == 3  # 2 / (6 / 8)
    assert num_further(dict(enumerate([True] * 2 + [False] * 6)), 8) == 8
    assert num_further(dict(enumerate([False] * 8)), 8) == 8


def test_a_group_teaches_if_any_of_its_completions_has_an_advantage():
    """With normalize_then_sum also where the sum of the rewards is the same."""
    one, two, two_each = [1.0, 0.0], [0.0, 0.5], {"num_generations": 2}
    assert teaches([1.0, 0.0], [one], [1.0], TrainingConfig(scale_rewards="batch", **two_each))
    assert not teaches([1.0, 1.0], [one, two], [1.0, 2.0], TrainingConfig(**two_each))
    assert not teaches([float("nan"), 1.0], [[None, 1.0]], [1.0], TrainingConfig(**two_each))
    whitened = TrainingConfig(advantage_estimator="reinforce_plus_plus_baseline", **two_each)
    assert teaches([1.0, 0.0], [one], [1.0], whitened)
    gdpo = TrainingConfig(multi_objective_aggregation="normalize_then_sum", **two_each)
    assert teaches([1.0, 1.0], [one, two], [1.0, 2.0], gdpo)
    rounded = [0.3, 0.1 + 0.2]
    assert rounded[0] != rounded[1]
    for scale in ("group", "batch", "none"):
        assert not teaches(rounded, [rounded], [1.0], TrainingConfig(scale_rewards=scale, **two_each))
    assert not teaches([1.0, 1.0], [rounded, [0.7, 0.7]], [1.0, 1.0], gdpo)
    assert not teaches([1.0, 1.0], [[0.3, 0.9], [0.7, 0.1]], [1.0, 1.0], gdpo), "they cancel out but for rounding"


class Halves(Sampled):
    """A generator that notes the prompts' rows of each call, until it sleeps."""

    def __init__(self):
        super().__init__()
        self.asked: list[list[int]] = []
        self.sleeps = False

    def generate(self, prompts, *rest):
        assert not self.sleeps, "it has no weights"
        self.asked.append([prompt.index for prompt in prompts])
        return super().generate(prompts, *rest)

    def sleep(self):
        self.sleeps = True


def resampled(folder, *, useful=USEFUL, rank=0, world_size=1, known=(), **training):
    """Roll out step 0 of a run in which only `useful` rows teach, and journal it."""

    def score(prompts, completions):
        return [float(number % 2) if one.index in useful else 1.0 for number, one in enumerate(prompts)]

    def prompt(index, row):
        return Prompt(index=index, text="", token_ids=(index,))

    rows = [{"prompt": str(index)} for index in range(ROWS)]
    share = shard(PROMPTS, world_size, rank)
    loader = PromptLoader(
        PromptSource(rows, prompt, seed=0),
        share=share,
        prompts_per_step=PROMPTS,
        steps=range(5),
        num_workers=0,
        prefetch_steps=1,
        timeout_seconds=60,
        folder=folder,
    )
    branch = begin_branch(folder, attempt=0, step=0)[0] if rank == 0 else None
    branches = [branch]
    dist.broadcast_object_list(branches)
    rewards = [Reward(name="one", weight=1.0, scorer=Function(score))]
    parts = {"rewards": rewards, "prompts": loader, "share": share, "rank": rank, "world_size": world_size}
    parts |= {"journal": Journal(folder, branches[0], rank)}
    run = make_run(folder, generator := Halves(), parts=parts, known=known, **SETTINGS | training)
    generation = roll_out(run, 0, Clock())
    run.journal.close()
    return generation, generator


def rows(generation, batch=0):
    return [sample.prompt.index for sample in generation.rollouts[batch].samples[::2]]


def journalled(folder):
    return [[(one.position, one.slot, one.prompt_index) for one in groups] for groups in read_lineage(folder)]


@pytest.mark.usefixtures("only_rank")
def test_groups_that_teach_nothing_are_replaced_by_those_of_further_rows(tmp_path, caplog):
    caplog.set_level("INFO")
    plain, _ = resampled(tmp_path / "plain", max_resample_times=0)
    generation, generator = resampled(tmp_path / "run")
    own, trained = rows(plain), rows(generation)
    assert [row % 3 for row in trained] == [0] * PROMPTS != [row % 3 for row in own]
    assert [row for row in own if row % 3 == 0] == [mine for mine, row in zip(trained, own, strict=True) if mine == row]
    assert all(sample.advantage for sample in generation.rollouts[0].samples)
    calls = generator.asked
    assert calls[0] == own
    asked = [row for call in calls for row in call]
    metrics = generation.rollouts[0].metrics
    assert metrics == {
        "resampling/rounds": len(calls) - 1,
        "resampling/groups": len(asked) - PROMPTS,
        "resampling/frac_reward_zero_std": sum(row % 3 > 0 for row in asked) / len(asked),
    }
    assert generation.generated_tokens == 2 * len(asked)
    assert [(at, row) for at, _, row in journalled(tmp_path / "run")[0]] == list(enumerate(trained))
    num_replaced = sum(mine != row for mine, row in zip(trained, own, strict=True))
    assert f"step 1: {num_replaced} groups that teach nothing are replaced" in caplog.text
    assert plain.rollouts[0].metrics == {}


@pytest.mark.usefixtures("only_rank")
def test_after_the_last_round_the_batch_is_filled_with_its_own_groups(tmp_path):
    generation, generator = resampled(tmp_path, useful=frozenset(), max_resample_times=2)
    assert generation.rollouts[0].metrics["resampling/rounds"] == 2
    assert rows(generation) == generator.asked[0]
    assert [len(call) for call in generator.asked] == [5, 5, 5]
    _, known = begin_branch(tmp_path, attempt=0, step=0)
    again, generator = resampled(tmp_path, useful=frozenset(), max_resample_times=2, known=known)
    assert (rows(again), generator.asked) == (rows(generation), [[]]), "a resumed run leaves it at that"


@pytest.mark.usefixtures("only_rank")
def test_batches_of_one_generation_are_filled_together(tmp_path):
    generation, generator = resampled(tmp_path, steps_per_generation=2)
    assert [row % 3 for batch in (0, 1) for row in rows(generation, batch)] == [0] * 2 * PROMPTS
    assert [[row for _, _, row in step] for step in journalled(tmp_path)] == [rows(generation, 0), rows(generation, 1)]
    assert {one.metrics["resampling/rounds"] for one in generation.rollouts.values()} == {len(generator.asked) - 1}


@pytest.mark.usefixtures("only_rank")
def test_a_resumed_run_samples_no_group_of_a_settled_batch_and_all_replacements_of_others(tmp_path):
    whole, _ = resampled(tmp_path)
    _, known = begin_branch(tmp_path, attempt=0, step=0)
    assert any(group.slot >= PROMPTS for group in known)
    again, generator = resampled(tmp_path, known=known)
    assert (rows(again), generator.asked) == (rows(whole), [[]])

    lost = [group for group in known if group.position > 0]  # killed while one rank wrote
    again, generator = resampled(tmp_path, known=lost)
    own = {group.prompt_index for group in lost if group.slot == group.position}
    assert rows(again) == rows(whole)
    first = rows(resampled(tmp_path / "plain", max_resample_times=0)[0])
    assert generator.asked[0] == [row for row in first if row not in own]
    assert journalled(tmp_path)[0] == [(group.position, group.slot, group.prompt_index) for group in known]

    replaced = next(group for group in known if group.slot >= PROMPTS)
    others = [group for group in known if group is not replaced]
    _, generator = resampled(tmp_path, known=[*others, replace(replaced, prompt_ids=(-1,))])
    assert generator.asked[0] == [first[replaced.position]], "its row has another prompt: the batch's own takes part"
    # A job that replaces no group any more samples its own rows.
    again, generator = resampled(tmp_path / "none", known=known, max_resample_times=0)
    assert (rows(again), generator.asked) == (first, [[row for row in first if row not in rows(whole)]])


def _as_rank(folder, rank, size):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "s"), size), rank=rank, world_size=size)
    generation, generator = resampled(folder, rank=rank, world_size=size)
    dist.destroy_process_group()
    return generation.rollouts[0].metrics, generator.asked


def test_any_number_of_ranks_trains_on_the_same_groups(tmp_path):
    """A rank that has no group in the end still has its place in the journal."""
    outcomes = []
    for world_size in (1, 3, 7):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(world_size, mp_context=fork) as pool:
            ranks = [pool.submit(_as_rank, folder, rank, world_size) for rank in range(world_size)]
            answers = [rank.result(60) for rank in ranks]
        together = [
            sorted(row for part in of_round for row in part) for of_round in zip(*(a for _, a in answers), strict=True)
        ]
        outcomes.append((journalled(folder), answers[0][0], together))
    assert outcomes[0][0], "the journal is whole"
    assert outcomes.count(outcomes[0]) == 3
