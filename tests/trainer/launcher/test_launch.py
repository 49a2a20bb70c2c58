"""Asserts outcomes, messages and HTTP answers of launchers: real processes on loopback, whose ranks are real too."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from grpo_spec.reports import ExitCode
from support.trainer.launchers import World, eventually

ALL_REDUCE = """
    mark("ran")
    print("sum", sum_over_ranks())
"""
WAIT_FOR_SIGTERM = """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    mark("waits")
    while not asked:
        time.sleep(0.05)
    sys.exit(75)
"""
HANG = """
    mark("waits")
    time.sleep(120)
"""


@pytest.fixture
def make_world(tmp_path):
    worlds: list[World] = []

    def make(gpus, body, **options):
        worlds.append(World(tmp_path, gpus, body, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def test_ranks_of_pods_of_different_sizes_meet_and_finish(make_world):
    world = make_world([2, 1], ALL_REDUCE)
    first, second = world.start()

    outcomes = [first.ends(), second.ends()]

    assert [(outcome.exit_code, outcome.reason, outcome.attempt) for outcome in outcomes] == [
        (ExitCode.DONE, "Done", 4)
    ] * 2
    assert outcomes[1].pod_uid == "uid-of-pod-1"
    assert (first.marks("ran"), second.marks("ran")) == ([0, 1], [2])
    assert all(f"[rank {rank}] sum 3" in first.log.read_text() for rank in (0, 1))
    assert (second.state / "logs" / "rank-2.stdout.log").read_text() == "sum 3\n"


def test_a_pod_that_finishes_much_earlier_is_not_lost(make_world):
    world = make_world([1, 1], f"{ALL_REDUCE}    if RANK == 1: time.sleep(4)\n")
    world.timing |= {"linger": 1}
    first, second = world.start()

    assert first.ends().exit_code == ExitCode.DONE
    # pod-0 is gone, and pod-1 has seen that it finished. pod-1 goes on for longer than `lost`.
    assert second.process.poll() is None
    assert second.ends().exit_code == ExitCode.DONE


def test_a_rank_that_raises_is_named_in_every_pod(make_world):
    lingers = "    if RANK == 2: atexit.register(time.sleep, 2)\n"  # after its connections are closed, as some do
    raises = "    if RANK == 2: raise KeyError('reward column')\n    sum_over_ranks()\n"
    world = make_world([2, 1], f"{lingers}{ALL_REDUCE}{raises}")
    first, second = world.start()

    theirs, own = first.ends(), second.ends()

    assert (own.exit_code, own.reason, own.rank) == (ExitCode.RANK_FAILED, "RankFailed", 2)
    assert own.message.startswith("rank 2 failed with exit code 1: KeyError: 'reward column'")
    assert "rank.py" in own.message
    assert (theirs.exit_code, theirs.reason) == (ExitCode.PEER_LOST, "PeerLost")
    assert "pod pod-1 ended with RankFailed of rank 2: its own outcome says why" in theirs.message
    assert "reward column" not in theirs.message, "what an exception quotes does not leave a pod over its open port"


def test_a_killed_rank_ends_the_other_ranks_of_its_pod(make_world):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    body = f"    if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\n    {ignore}{HANG}"
    (pod,) = make_world([2], body).start()

    outcome = pod.ends()

    assert (outcome.exit_code, outcome.rank) == (ExitCode.RANK_FAILED, 1)
    assert "rank 1 was killed by SIGKILL (probably out of memory" in outcome.message
    assert not pod.rank_pids()


def test_the_end_of_the_failed_ranks_log_stays_in_the_runs_folder(make_world, tmp_path):
    """A pod's log goes with the pod; a folder that goes with it, too, gets nothing."""
    fails = "    print('loading')\n    if RANK == 1:\n        print('no luck', file=sys.stderr)\n        sys.exit(64)\n"
    kept = tmp_path / "data/ns/job/u/logs/pod-0.log"
    for durable in (False, True):
        (folder := tmp_path / str(durable)).mkdir()
        with closing(World(folder, [2], fails + WAIT_FOR_SIGTERM, durable=durable)) as world:
            outcome = world.pods[0].start(GRPO_DATA_DIR=str(tmp_path / "data")).ends()
        assert outcome.rank == 1
        assert kept.exists() is durable
    text = kept.read_text()
    assert text.startswith("attempt 4, ended ")
    assert "end of rank 1's stdout\nloading\n" in text
    assert text.endswith("end of rank 1's stderr\nno luck\n")
    assert list(kept.parent.iterdir()) == [kept]


def test_a_peer_that_never_listens_is_named(make_world):
    world = make_world([1, 1], ALL_REDUCE, timeout=3)
    pod = world.pods[0].start()

    waiting = eventually(
        lambda: (pod.json("/progress") or {}).get("waitingFor"), "progress says which pods are missing"
    )
    assert pod.json("/progress")["phase"] == "WaitingForPeers"
    assert any("pod-1: " in one for one in waiting)
    assert pod.get("/readyz")[0] == 503
    outcome = pod.ends()

    assert (outcome.exit_code, outcome.reason) == (ExitCode.PEER_LOST, "PeersMissing")
    assert outcome.message.startswith("1 of 2 pods not reached (pod pod-1: TCP: 127.0.0.1:")
    assert "after 3 s" in outcome.message
    assert "waiting: 1 of 2 pods not reached" in pod.log.read_text()
    assert pod.marks("ran") == []


def test_a_restarted_launcher_holds_and_runs_nothing_again(make_world):
    (pod,) = make_world([1], f"    mark('ran')\n{'    raise ValueError(1)'}\n").start()
    first = pod.ends()
    pod.start()

    eventually(
        lambda: pod.termination_log.exists() and pod.marks("ahead"), "the launcher holds, with a rank that waits"
    )
    assert pod.get("/readyz")[0] == 503
    assert pod.get("/healthz")[0] == 200
    assert pod.json("/identity")["ended"]["reason"] == "RankFailed"
    pod.signal(signal.SIGTERM)

    assert pod.ends() == first
    assert pod.marks("ran") == [0]
    assert not pod.rank_pids()


def test_launchers_that_hold_begin_a_later_attempt_in_the_same_process(make_world):
    later = "(STATE / 'attempt-5').exists()"
    fails = f"    if RANK == 1 and not {later}: raise RuntimeError('no luck')\n"
    ran = f"    if {later}: mark('ran'); (STATE / 'pid').write_text(str(os.getpid()))\n"
    world = make_world([1, 1], f"{fails}{ran}    sum_over_ranks()\n")
    assert [pod.ends().reason for pod in world.start()] == ["PeerLost", "RankFailed"]
    first, second = world.start()
    eventually(lambda: all((pod.json("/identity") or {}).get("ended") for pod in world.pods), "both hold")
    assert json.loads(second.termination_log.read_text())["attempt"] == 4
    eventually(lambda: first.marks("ahead") and second.marks("ahead"), "ranks are started ahead")
    (killed,), (waiting,) = first.rank_pids(), second.rank_pids()
    os.kill(killed, signal.SIGKILL)

    world.announce(3)
    world.announce(5)

    outcomes = [first.ends(), second.ends()]
    assert [(outcome.attempt, outcome.reason) for outcome in outcomes] == [(5, "Done"), (5, "Done")]
    assert (first.marks("ran"), second.marks("ran")) == ([0], [1])
    assert "a later attempt than 4 begins" in second.log.read_text()
    assert (second.state / "pid").read_text() == f"{waiting}", "the rank that was started ahead"
    assert (first.state / "pid").read_text() != f"{killed}"


def test_a_launcher_that_waits_for_peers_of_an_earlier_attempt_goes_on_to_the_later_one(make_world):
    world = make_world([1, 1], ALL_REDUCE)
    first = world.pods[0].start()
    eventually(lambda: (first.json("/progress") or {}).get("waitingFor"), "the launcher waits for its peer")

    world.announce(5)
    second = world.pods[1].start()

    assert [(pod.ends().attempt, pod.marks("ran")) for pod in (first, second)] == [(5, [0]), (5, [1])]
    assert json.loads((first.state / "attempt-4" / "result.json").read_text())["reason"] == "StoppedEarly"


def test_a_killed_launcher_records_it_after_its_restart_and_its_peer_notices(make_world):
    world = make_world([1, 1], HANG)
    first, second = world.start()
    eventually(lambda: first.marks("waits") and second.marks("waits"), "all ranks run")
    second.signal_ranks(signal.SIGSTOP)  # like ranks that are stuck
    second.signal(signal.SIGKILL)
    second.process.wait()
    second.signal_ranks(signal.SIGKILL)  # as the kernel does when a container's first process ends

    lost = first.ends()
    died = second.start().ends()

    assert (lost.exit_code, lost.reason) == (ExitCode.PEER_LOST, "PeerLost")
    assert "pod pod-1 has not answered for" in lost.message
    assert (died.exit_code, died.reason) == (ExitCode.RANK_FAILED, "LauncherDied")
    assert not first.rank_pids()


def test_sigterm_is_passed_on_to_the_ranks_which_stop(make_world):
    world = make_world([2, 1], WAIT_FOR_SIGTERM)
    first, second = world.start()
    eventually(lambda: len(first.marks("waits") + second.marks("waits")) == 3, "all ranks run")
    assert first.get("/readyz")[0] == 200
    phases = [pod.json("/progress")["rankPhases"] for pod in (first, second)]
    assert [list(one) for one in phases] == [["0", "1"], ["2"]]
    assert phases[1]["2"].startswith("Starting for ")
    assert 'grpo_ready{grpojob="job",namespace="ns",pod="pod-0"} 1.0' in first.get("/metrics")[1]

    for pod in (first, second):
        pod.signal(signal.SIGTERM)

    assert [pod.ends().reason for pod in (first, second)] == ["Stopped", "Stopped"]
    assert json.loads(first.termination_log.read_text())["exitCode"] == ExitCode.STOPPED


def test_sigterm_before_all_pods_answer_stops_early(make_world):
    pod = make_world([1, 1], ALL_REDUCE).pods[0].start()
    eventually(lambda: (pod.json("/progress") or {}).get("waitingFor"), "the launcher waits for its peer")

    pod.signal(signal.SIGTERM)

    outcome = pod.ends()
    assert (outcome.exit_code, outcome.reason) == (ExitCode.STOPPED, "StoppedEarly")


def test_another_contract_version_is_refused(make_world):
    world = make_world([1], ALL_REDUCE)
    world.contract.write_text(json.dumps(world.values | {"contractVersion": 2}))

    outcome = world.pods[0].start().ends()

    assert (outcome.exit_code, outcome.reason, outcome.attempt) == (ExitCode.CONFIG_ERROR, "ContractRefused", 4)
    assert "contractVersion 2" in outcome.message
    assert "contractVersion 1" in outcome.message


def test_a_plain_start_names_the_missing_variables():
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GRPO_", "POD_"))}
    done = subprocess.run(
        [sys.executable, "-m", "grpo_workload.trainer_pod"], env=environ, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == ExitCode.CONFIG_ERROR
    assert "missing variables: GRPO_CONTRACT, POD_NAME, POD_UID" in done.stderr
    assert "grpo run" in done.stderr
