"""A rollout counts own tokens alone, leaves lost episodes out, and ends where too many are lost."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from grpo_spec.environments import EpisodesConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import Episode, Fork, Prompt
from grpo_workload.algorithm.step_plan import EpisodeFact, plan
from grpo_workload.rewards.scorer import Function
from grpo_workload.rewards.scoring import Reward
from grpo_workload.storage.journal import begin_branch
from grpo_workload.training.kl_penalty import divergences
from grpo_workload.training.lost_episodes import EnvironmentFailedError, Losses, too_many
from support.trainer.rollouts import Sampled, make_run, roll
from support.trainer.samples import make_completion

pytestmark = pytest.mark.usefixtures("only_rank")

PROMPT = (1, 2, 3)


class Acting(Sampled):
    """A generator whose completions are episodes: of a prompt, by the number of the completion."""

    def __init__(self, episodes):
        super().__init__()
        self._episodes = episodes
        self.asked: list[int] = []

    def generate(self, prompts, num_generations, *_):
        self.asked += [prompt.index for prompt in prompts]
        return [[self._episodes(prompt, number) for number in range(num_generations)] for prompt in prompts]


def acted():
    """Return an episode of two turns: three own tokens, and two of a result."""
    return make_completion(
        (5, 90, 91, 6, 7),
        logprobs=(-1.0, 0.0, 0.0, -1.0, -1.0),
        text="last",
        episode=Episode(context=((1, 3),), prompt_ids=PROMPT, num_turns=2, num_calls=1, state=b"state"),
    )


def forked():
    """Return an episode that goes on from another history: one more own token, behind two that are read."""
    fork = Fork(prompt_ids=(1, 2), token_ids=(4, 5, 8), logprobs=(0.0, 0.0, -1.0), context=((0, 2),))
    one = acted()
    return replace(one, episode=replace(one.episode, forks=(fork,)))


def lost():
    episode = Episode(lost="process", failure="it ended with exit code 3", retries=2)
    return replace(acted(), token_ids=(), logprobs=(), text="", episode=episode)


def first_lost(prompt, number):
    return lost() if prompt.index == 0 and number == 0 else acted()


def rolled(folder, generator, share=1.0, **settings):
    def scores(prompts, completions):
        assert all(one.token_ids for one in completions), "none of them is lost"
        return [float(number) for number in range(len(completions))]

    parts = {"rewards": [Reward(name="one", weight=1.0, scorer=Function(scores))]}
    return roll(folder, generator, parts=parts, episodes=EpisodesConfig(max_failed_share=share), **settings)


def test_facts_are_of_own_tokens_and_lost_episodes_have_no_advantage(tmp_path):
    generation = rolled(tmp_path, Acting(first_lost), num_generations=3)
    (rollout,) = generation.rollouts.values()
    (facts,) = rollout.facts
    assert generation.generated_tokens == 5 * 3
    assert facts[0].is_lost
    assert math.isnan(facts[0].reward)
    assert [fact.advantage == 0 for fact in facts] == [True, False, False, False, True, False], "the middle one is 0"
    assert (facts[1].tokens, facts[1].prompt_tokens) == (3, len(PROMPT) + 2)
    assert facts[1].episode == EpisodeFact(turns=2, calls=1, context_tokens=2)
    assert [fact.prompt for fact in facts[1:]] == [(1, len(PROMPT))] * 5, "what the environments return is the same"
    made = plan(rollout.facts, make_run(tmp_path / "other", Sampled()).config.training)
    assert (made.scale.num_sequences, made.scale.num_tokens) == (5, 15)
    assert sorted(piece.place for pieces in made.bins[0] for piece in pieces) == [1, 2, 3, 5]
    assert all(sample.completion.episode.state is None for sample in rollout.samples if sample.completion.episode)


def test_a_restart_uses_the_episodes_of_the_journal_and_their_lost_ones_again(tmp_path):
    (first,) = rolled(tmp_path, Acting(first_lost)).rollouts.values()
    _, known = begin_branch(tmp_path, attempt=1, step=0)
    (again,) = rolled(tmp_path, generator := Acting(first_lost), known=known).rollouts.values()
    assert generator.asked == []
    assert again.samples[1:] == first.samples[1:]
    assert again.samples[0].completion == first.samples[0].completion
    assert again.facts[0][1:] == first.facts[0][1:]


def test_an_episode_that_forked_counts_once_and_a_restart_uses_all_its_sequences(tmp_path):
    def first_forked(prompt, number):
        return forked() if number == 0 else acted()

    (first,) = rolled(tmp_path, Acting(first_forked), num_generations=3).rollouts.values()
    (facts,) = first.facts
    assert [(one.tokens, one.prompt_tokens, one.sequences) for one in facts[:2]] == [(4, 9, (8, 5)), (3, 5, ())]
    assert facts[0].episode == EpisodeFact(turns=2, calls=1, context_tokens=2 + 2 + 2, sequences=2)
    assert [fact.advantage for fact in facts[:3]] == pytest.approx([-1, 0, 1], abs=1e-3), "each episode counts once"
    _, known = begin_branch(tmp_path, attempt=1, step=0)
    (again,) = rolled(tmp_path, generator := Acting(first_forked), known=known, num_generations=3).rollouts.values()
    assert generator.asked == []
    assert (again.samples, again.facts) == (first.samples, first.facts)
    assert len(again.samples[0].completion.episode.forks) == 1


def test_too_many_lost_episodes_end_the_attempt_and_are_not_journalled(tmp_path):
    with pytest.raises(EnvironmentFailedError, match=r"1 of 4 episodes.*\(1 process\).*0\.2; .*exit code 3\. Look"):
        rolled(tmp_path, Acting(first_lost), share=0.2)
    assert begin_branch(tmp_path, attempt=1, step=0)[1] == []
    rolled(tmp_path / "other", Acting(first_lost), share=0.25)


def test_a_group_that_is_lost_as_a_whole_teaches_nothing_and_is_replaced(tmp_path):
    class Further:
        def take(self, step):
            return [Prompt(index=place, text="", token_ids=(place,)) for place in range(2)]

        def further(self, batch, slots):
            return [Prompt(index=slot, text="", token_ids=(slot,)) for slot in slots]

    def whole(prompt, number):
        return lost() if prompt.index == 0 else acted()

    def by_number(prompts, completions):
        return [float(number % 2) for number in range(len(completions))]

    reward = Reward(name="one", weight=1.0, scorer=Function(by_number))
    generation = roll(
        tmp_path,
        generator := Acting(whole),
        parts={"rewards": [reward], "prompts": Further()},
        episodes=EpisodesConfig(max_failed_share=1.0),
        max_resample_times=1,
    )
    (rollout,) = generation.rollouts.values()
    assert generator.asked[:3] == [0, 1, 2]
    assert 0 not in {sample.prompt.index for sample in rollout.samples}


def test_the_kl_penalty_is_of_own_tokens_and_unknown_for_lost_episodes():
    class Counting:
        group = None

        def divergence(self, batch, temperature):
            return batch.mask_BC.sum(dim=1)

    prompt = Prompt(index=0, text="", token_ids=(9,))
    short = replace(acted(), token_ids=(5,), logprobs=(-1.0,), episode=None)
    own = [(prompt, one) for one in (lost(), acted(), short, lost(), forked())]
    found = divergences(Counting(), own, TrainingConfig(per_device_train_batch_size=1))
    assert found == pytest.approx([math.nan, 3, 1, math.nan, 3 + 1], nan_ok=True)


def test_all_ranks_together_have_a_share():
    ranks = [Losses(count=8, causes=Counter(timeout=1)), Losses(count=2, causes=Counter(process=2), last="gone")]
    assert too_many(ranks, 0.3) is None
    complaint = too_many(ranks, 0.29)
    assert all(part in complaint for part in ("3 of 10 episodes", "(2 process, 1 timeout)", "gone"))
    assert too_many([Losses(count=4, causes=Counter())], 0.0) is None
    assert too_many([Losses(count=0, causes=Counter())], 0.0) is None
