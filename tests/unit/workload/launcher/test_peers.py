"""The rendezvous waits for pods whose nodes become free one after another, and gives up once none answers for too long.

A pod that failed first is blamed also when it no longer answers. The launchers' status servers are real; only the
clock of the rendezvous is the test's.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_spec.contract import Contract
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from grpo_workload.launcher.peers import LostPeer, Peers, Timing, UnreachableError, peers_of
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.status_server import Status, serving
from grpo_workload.pod.run_once import make_outcome
from support.trainer.launchers import free_ports
from support.trainer.places import CONTRACT

LIMIT = 600
NAMES = ("job-a-0", "job-a-1", "job-a-2")


def places(folder: Path) -> list[Place]:
    members = [
        {"pod": name, "group": "a", "host": "127.0.0.1", "gpus": 1, "rankOffset": rank, "statusPort": port}
        for rank, (name, port) in enumerate(zip(NAMES, free_ports(len(NAMES)), strict=True))
    ]
    contract = Contract.model_validate({**CONTRACT, "members": members, "timeoutSeconds": LIMIT})
    return [
        Place(contract=contract, pod=name, pod_uid=name, state_dir=folder, termination_log=folder / "log")
        for name in NAMES
    ]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  # a dictionary sets no event
            await asyncio.sleep(0.005)


async def gather(folder: Path, *, last_comes: bool) -> LostPeer | None:
    """Return how the first pod's rendezvous ends; the others begin to answer after 500 and, if at all, 1000 seconds."""
    first, second, third = places(folder)
    now, looks = 0.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    async def looked() -> None:
        """Wait until the rendezvous has looked at the clock again, in another round."""
        seen = looks
        await until(lambda: rendezvous.done() or looks > seen + 8)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(Status(first)))
        peers: Peers = await stack.enter_async_context(peers_of(first, Timing(retry=0.01, report=0.01)))
        peers.clock = clock
        rendezvous = asyncio.create_task(peers.gather())
        await until(lambda: peers.missing.keys() == {second.pod, third.pod})
        now = 500
        await stack.enter_async_context(serving(Status(second)))
        await until(lambda: peers.missing.keys() == {third.pod})
        await looked()
        now = 1000 if last_comes else 500 + LIMIT
        await looked()
        if last_comes:
            await stack.enter_async_context(serving(Status(third)))
        return await asyncio.wait_for(rendezvous, 20)


async def test_the_limit_counts_from_the_last_pod_that_answered(tmp_path: Path) -> None:
    assert await gather(tmp_path, last_comes=True) is None


async def test_a_pod_that_never_answers_is_named(tmp_path: Path) -> None:
    lost = await gather(tmp_path, last_comes=False)
    assert lost is not None
    assert lost.reason == Reason.PEERS_MISSING
    assert lost.message.startswith("1 of 3 pods not reached (pod job-a-2: TCP: 127.0.0.1:")


@pytest.mark.parametrize("failed_after", [-60, 60])
async def test_a_pod_that_was_seen_to_fail_is_the_cause_if_it_failed_first_also_when_it_is_gone(
    tmp_path: Path, failed_after: int
) -> None:
    first, second, _ = places(tmp_path)
    two = first.contract.model_copy(update={"members": first.contract.members[:2]})
    first, second = (replace(place, contract=two) for place in (first, second))
    async with peers_of(first, Timing(watch=0.01)) as peers:
        peers.uids[second.pod] = second.pod_uid
        async with serving(status := Status(second)):
            status.end(make_outcome(second, ExitCode.RANK_FAILED, Reason.RANK_FAILED, "killed"))
            seen = await asyncio.wait_for(peers.watch(), 20)
        found = await peers.earlier_failure(status.ended_at + failed_after)
    assert seen.message.startswith("pod job-a-1 ended with RankFailed")
    assert found == (seen if failed_after > 0 else None)


async def test_only_a_pod_of_this_attempt_under_a_name_that_resolves_is_reached(tmp_path: Path) -> None:
    first, second, _ = places(tmp_path)
    (_, member, _), attempt = first.contract.members, first.contract.attempt
    earlier = replace(second, contract=second.contract.model_copy(update={"attempt": attempt - 1}))
    async with serving(Status(earlier)), peers_of(first, Timing()) as peers:
        with pytest.raises(
            UnreachableError, match=rf"of attempt {attempt - 1}, expected pod job-a-1 of attempt {attempt}"
        ):
            await peers.ask(member)
        with pytest.raises(UnreachableError, match=r"^DNS: job-a-1\.invalid does not resolve"):
            await peers.ask(member.model_copy(update={"host": "job-a-1.invalid"}))


async def test_a_pod_that_was_replaced_or_ended_before_all_were_reached_ends_the_attempt(tmp_path: Path) -> None:
    first, second, _ = places(tmp_path)
    async with serving(status := Status(second)), peers_of(first, Timing(watch=0.01)) as peers:
        peers.uids = {NAMES[1]: "earlier", NAMES[2]: "third"}
        replaced = await asyncio.wait_for(peers.watch(), 20)
        status.end(make_outcome(second, ExitCode.PEER_LOST, Reason.PEER_LOST, "gone"))
        ended = await asyncio.wait_for(peers.gather(), 20)
    assert replaced.reason == Reason.PEER_LOST
    assert replaced.message == "pod job-a-1 was replaced: its UID was earlier and is now job-a-1"
    assert ended is not None
    assert ended.message.startswith("pod job-a-1 ended before all pods were reached: PeerLost")
