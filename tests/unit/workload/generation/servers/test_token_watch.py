"""An engine hangs if it has requests and its metrics stay the same, not if its requests take long."""

import pytest

from grpo_workload.generation.servers.token_watch import TokenWatch, replicas

HOUR = 3600


def metrics(*tokens, running=3.0):
    """The part of GET /metrics that tells of an engine whose copies have sampled so many tokens."""
    lines = ["# HELP vllm:generation_tokens_total Number of generation tokens.", "process_cpu_seconds_total 9.5"]
    for copy, number in enumerate(tokens):
        labels = f'{{engine="{copy}",model_name="m"}}'
        lines += [f"vllm:num_requests_running{labels} {running}", f"vllm:generation_tokens_total{labels} {number}.0"]
    return "\n".join(lines) + "\n"


@pytest.fixture
def watch():
    """The watch over an engine of two copies that answered at 0 s, and has had another request since."""
    watch = TokenWatch(limit=15, first_limit=600, quiet=5, copies=2)
    watch.sent("process", 0)
    watch.sent("process", 0)
    watch.ended(answered=True, now=0)
    return watch


def test_samples_are_told_apart_by_copy_and_only_those_of_vllm_count():
    found = replicas(metrics(5, 6))
    assert [lines.count("\n") for lines in found.values()] == [1, 1]
    assert "6.0" in found["1"]
    assert replicas("process_cpu_seconds_total 9.5\n") == {}


def test_a_request_may_take_an_hour_while_tokens_are_sampled(watch):
    moves = [watch.see(metrics(second, second), second) for second in range(0, HOUR, 10)]
    assert moves == [False, *[True] * (len(moves) - 1)]
    assert not watch.is_stuck


def test_an_engine_without_new_tokens_hangs_until_it_gets_on(watch):
    watch.see(metrics(7, 7), 2)
    watch.see(metrics(7, 7), 15)
    assert not watch.is_stuck
    watch.see(metrics(7, 7), 17.5)
    assert watch.is_stuck
    watch.ended(answered=False, now=18)
    assert watch.needs_look(18)
    watch.see(metrics(7, 7), 20)
    assert watch.is_stuck, "it still hangs after the requests were given up"
    watch.see(metrics(8, 8), 22)
    assert not watch.is_stuck


def test_one_copy_may_hang_while_another_samples_and_answers(watch):
    for second in range(0, 20, 2):
        watch.sent("process", second)
        watch.ended(answered=True, now=second)
        assert watch.needs_look(second)
        watch.see(metrics(second, 7), second)
    assert watch.is_stuck


def test_an_idle_copy_does_not_hang(watch):
    for second in range(0, HOUR, 2):
        watch.see(metrics(second) + metrics(0, 7, running=0.0).split("\n", 4)[4], second)
    assert not watch.is_stuck


def test_a_process_may_take_long_for_its_first_answer(watch):
    watch.sent("another process", 0)
    watch.see(metrics(0, 0), 1)
    watch.see(metrics(0, 0), 500)
    assert (watch.is_stuck, watch.allowed) == (False, 600)
    watch.see(metrics(0, 0), 602)
    assert watch.is_stuck


def test_an_engine_without_requests_is_not_looked_at_and_does_not_hang(watch):
    watch.see(metrics(7, 7), 1)
    watch.ended(answered=True, now=2)
    assert not watch.needs_look(HOUR)
    watch.sent("process", HOUR)
    assert watch.needs_look(HOUR + 1)
    watch.see(metrics(7, 7), HOUR + 1)
    assert not watch.is_stuck
