"""The proposal from who waits for whom: it reduces the larger waiting, stays while steps vary, and ends somewhere.

Steps are those of a model: engines need `work` seconds together, ranks `train` seconds, and with maxStaleness > 0 both
work at the same time. Advice to raise sessions comes where waiting for them makes steps long, and for no other reason.
"""

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.generation import Topology
from grpo_workload.training.balance import FEWEST_ROUNDS, MOST_ROUNDS, STEADY, Advisor, Balance, Shares, advise, nearest
from grpo_workload.training.session_advice import SessionAdvisor
from support.paths import ROOT
from support.trainer.places import config_of

SIZES = (1,)


def make_advisor(staleness=1, topology="Server", together=1):
    training = {"maxStaleness": staleness, "stepsPerGeneration": together}
    return Advisor(config_of(training=training, generation={"topology": topology}))


def add(advisor, seconds, waiting, idle, sizes, longest=64):
    metrics = {
        "ranks/generate_seconds/max": waiting,
        "ranks/engines_idle_seconds/min": idle,
        "completions/max_length": longest,
        "completions/mean_length": 64,
    }
    return advisor.add(metrics, seconds, sizes)


def waits(work, train, number):
    """Return a step of the model: its seconds, and for how long ranks wait and engines are idle."""
    seconds = max(work / number, train)
    return seconds, seconds - train, seconds - work / number


def run(advisor, work, train, sizes, rounds=FEWEST_ROUNDS + 2):
    """Return the answers to so many rounds of maxStaleness 1."""
    return [add(advisor, *waits(work, train, len(sizes)), sizes) for _ in range(2 * rounds)]


@given(work=st.floats(0.01, 1000), train=st.floats(1, 1000), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=40))
def test_a_proposal_makes_the_larger_waiting_smaller_until_there_is_none(work, train, sizes):
    def larger_share(number):
        seconds, *waiting = waits(work, train, number)
        return max(waiting) / seconds

    number, seen = len(sizes), []
    while number not in seen:
        seen.append(number)
        answer = run(make_advisor(), work, train, [*sizes, *sizes * (number // len(sizes))][:number])[-1]
        assert answer.engines == number or larger_share(answer.engines) < larger_share(number)
        assert number / 2 <= answer.engines <= 2 * number, "what is further away was not measured"
        number = answer.engines
    assert seen[-1] == number, "the last proposal is to change nothing"
    best = min(map(larger_share, range(max(1, number - 1), number + 2)))
    assert larger_share(number) <= best + 2 * STEADY


@given(ratio=st.floats(0.1, 60), number=st.integers(1, 40), staleness=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_proposal_stays_while_steps_vary_by_5_percent(ratio, number, staleness, seed):
    draw, advisor, proposed = random.Random(seed), make_advisor(staleness), []
    for _ in range((staleness + 1) * 3 * MOST_ROUNDS):
        work, train = (seconds * draw.uniform(0.95, 1.05) for seconds in (ratio, 1.0))
        proposed.append(add(advisor, *waits(work, train, number), SIZES * number).engines)
    known = [engines for engines in proposed if engines is not None]
    changes = sum(now != before for before, now in pairwise(known))
    assert known
    assert changes <= 1, "at most one, if the first rounds were at the edge"


@given(need=st.floats(0.001, 1000), kept=st.integers(1, 1000))
def test_the_nearest_number_changes_only_if_another_one_is_nearer(need, kept):
    chosen = nearest(need, kept)
    assert chosen >= 1
    assert nearest(need, chosen) == chosen
    if chosen != kept:
        assert abs(math.log(need / chosen)) < abs(math.log(need / kept))


def test_steps_that_come_in_bursts_are_looked_at_in_rounds():
    """Measured on two H200s with one rank and one engine, where the median step of maxStaleness 2 waits for nothing."""
    results = ROOT / "benchmarks" / "results" / "staleness_h200.jsonl"
    shares = {}
    for line in map(json.loads, results.read_text().splitlines()):
        if line["row"] in ("server:lognormal:1", "server:lognormal:2", "server:lognormal:4"):
            advisor = make_advisor(int(line["row"][-1]))
            for step in line["steps"][line["warmup"] :] * 8:  # as many rounds as a run has
                answer = add(advisor, step["step_time"], step["time/generate"], 0.0, SIZES, longest=4 * 64)
            shares[line["row"][-1]] = answer.advice
    assert shares["1"].startswith("ranks wait 6")
    assert shares["2"].startswith("ranks wait 4")
    assert "maxStaleness from 2 to 3 in the next run, since the longest completion has 4.0 times" in shares["2"]
    assert shares["4"] is None


def test_the_first_steps_and_lost_engines_do_not_count():
    advisor = make_advisor()
    assert [add(advisor, 300, 250, 0, SIZES) for _ in range(3)] == [Balance()] * 3
    answers = run(advisor, 2.0, 1.0, SIZES)
    assert [answer.engines for answer in answers] == [None] * 9 + [2] * 5
    assert answers[-1].metrics == {"engines/balanced": 2.0}
    assert add(advisor, 900, 899, 0, SIZES) == add(advisor, 2, 1, 0, SIZES) == answers[-1]


def test_the_number_holds_while_engines_join_until_it_is_known_what_they_change():
    advisor = make_advisor()
    assert run(advisor, 4.0, 1.0, SIZES * 2)[-1].engines == 4
    assert run(advisor, 4.0, 1.0, SIZES * 3, rounds=FEWEST_ROUNDS - 1)[-1] == Balance(engines=4)
    answers = run(advisor, 4.0, 1.0, SIZES * 4, rounds=FEWEST_ROUNDS)
    assert {(answer.engines, answer.advice) for answer in answers} == {(4, None)}


def test_engines_that_do_not_help_are_not_followed_by_more():
    """Ranks wait for the longest completion, which no number of engines samples sooner."""
    advisor = make_advisor()

    def last(number):
        return [add(advisor, 4.0, 3.0, 0.0, SIZES * number) for _ in range(20)][-1]

    assert last(2).engines == 4
    stuck = last(4)
    assert stuck.engines == 4
    assert stuck.advice.endswith("allow shorter completions (spec.training.maxCompletionLength) in the next run")
    assert run(advisor, 8.0, 1.0, SIZES * 6)[-1].engines == 8, "these did help"


def test_without_staleness_no_number_of_engines_balances():
    answer = Balance()
    advisor = make_advisor(staleness=0)
    for _ in range(20):
        answer = add(advisor, 2.0, 1.0, 0.9, SIZES)
    assert answer.metrics == {}
    assert answer.advice == (
        "ranks wait 50% of a step for completions, engines are idle 45%: raise spec.training.maxStaleness from 0 to "
        "1 in the next run"
    )


def test_a_generator_without_engines_of_its_own_has_no_answer():
    assert make_advisor(topology="Colocate").add({}, 1.0, ()) == Balance()


ELASTIC = "(replicas in spec.generation.server.elastic; maxReplicas there, or replicas of groups, while suspended)"
SHORTER = "allow shorter completions (spec.training.maxCompletionLength)"
LARGER = "train with larger micro-batches (leave out spec.training.maxTokensPerMicroBatch, or give training more"


@pytest.mark.parametrize(
    ("waiting", "idle", "staleness", "sizes", "engines", "expected"),
    [
        (0.05, 0.09, 1, (1, 1), 2, None),
        (0.41, 0.02, 1, (1, 1), 3, f"run 3 engines in place of 2 {ELASTIC}"),
        (0.41, 0.02, 1, (1, 2), 3, f"run 3 engines in place of 2, of the same sizes {ELASTIC}"),
        (0.90, 0.02, 0, (1, 1), 4, f"run 4 engines in place of 2 {ELASTIC}"),
        (0.02, 0.90, 0, (1, 1), 1, "raise spec.training.maxStaleness from 0 to 1 in the next run"),
        (0.02, 0.60, 1, (1, 1), 1, f"run 1 engine in place of 2 {ELASTIC}"),
        (0.02, 0.60, 1, (1,), 1, LARGER),
        (0.10, 0.00, 1, (1,) * 20, 19, SHORTER),
        (0.30, 0.30, 1, (1, 1), 2, "raise spec.training.maxStaleness from 1 to 2 in the next run"),
        (0.30, 0.30, 4, (1, 1), 2, SHORTER),
    ],
)
def test_each_advice(waiting, idle, staleness, sizes, engines, expected):
    shares = Shares(waiting=waiting, idle=idle, unevenness=1.0)
    said = advise(shares, staleness, Topology.SERVER, sizes, engines)
    if expected is None:
        assert said is None
    else:
        seen, cure = said.split(": ")
        assert seen == f"ranks wait {waiting:.0%} of a step for completions, engines are idle {idle:.0%}"
        assert cure.startswith(expected)


@pytest.mark.parametrize(("waiting", "change"), [(0.4, "more"), (0.0, "fewer")])
def test_engines_beside_ranks_get_other_gpus(waiting, change):
    shares = Shares(waiting=waiting, idle=0.4 - waiting, unevenness=9.0)
    said = advise(shares, 1, Topology.NODE_LOCAL, (1, 1), 2)
    assert f": give engines {change} GPUs of each pod (spec.generation.nodeLocal.gpusPerNode)" in said
    assert ("; or raise spec.training.maxStaleness from 1 to 2" in said) == (change == "more")


def test_where_steps_share_a_generation_nothing_is_proposed():
    """Neither is `maxStaleness`, which the job could not have."""
    alone, together = make_advisor(0), make_advisor(0, together=4)
    answers = [[add(advisor, 10.0, 5.0, 5.0, SIZES) for _ in range(20)][-1] for advisor in (alone, together)]
    assert (answers[0].advice is None, answers[1]) == (False, Balance())


def advice_after(*steps, together=1):
    """Return the advice after steps, each with seconds that episodes waited, of generating, and of the whole."""
    training = {"promptsPerStep": 4, "numGenerations": 8, "stepsPerGeneration": together}
    advisor, said = SessionAdvisor(config_of(training=training)), None
    for waited, generating, seconds in steps:
        said = advisor.add({"episodes/wait_seconds/mean": waited, "ranks/generate_seconds/max": generating}, seconds)
    return said


def test_steps_in_which_episodes_wait_long_say_what_to_raise():
    assert advice_after(*[(6.0, 12.0, 20.0)] * 5) == (
        "episodes wait 6.0 s of a step's 20.0 s for a session of an environment pod: raise "
        "spec.environmentPods.groups[].replicas, or sessions where pods have memory for more, while suspended (32 "
        "episodes of a step at once need as many)"
    )


@pytest.mark.parametrize(
    "steps",
    [
        [(6.0, 12.0, 20.0)] * 4,  # too few are known
        [(4.0, 12.0, 20.0)] * 5,  # it is a small part
        [(60.0, 1.0, 20.0)] * 5,  # of later steps, while ranks train
        [(300.0, 301.0, 310.0), *[(0.1, 12.0, 20.0)] * 4],  # a pod has begun again
    ],
)
def test_other_steps_say_nothing(steps):
    assert advice_after(*steps) is None


def test_steps_of_one_generation_are_looked_at_together():
    said = advice_after(*[(12.0, 12.0, 16.0), (12.0, 0.0, 4.0)] * 5, together=2)
    assert said.startswith("episodes wait 12.0 s of a generation's 20.0 s"), said
