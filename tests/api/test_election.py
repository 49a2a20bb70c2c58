"""Elections on a real API server: only the operator that holds the Lease acts.

test_leader.py kills and pauses whole operators.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from kubernetes.aio import client
from kubernetes.aio.leaderelection import leaderelection

from grpo_devcluster.controlplane import ControlPlane
from grpo_operator.runtime.leader import Leadership, NotLeadingError, Timing
from support.control_plane.link import Link

PATIENT = Timing(lease=600, renew=500, retry=1)
"""Here nobody loses the Lease by waiting."""


@dataclass
class Candidates:
    """Operators of one namespace, each with its own connection, and what they did in order."""

    plane: ControlPlane
    namespace: str
    stack: AsyncExitStack
    events: list[str] = field(default_factory=list)

    async def add(self, name: str, timing: Timing) -> tuple[Leadership, Link]:
        link = await self.stack.enter_async_context(Link(self.plane))
        one = Leadership(link.api, self.namespace, "one", name, lambda: self.events.append(f"{name} lost"), timing)

        async def note() -> None:
            await one.leading.wait()
            one.check()
            self.events.append(f"{name} leads")

        for work in (one.run(), note()):
            self.stack.callback(asyncio.create_task(work).cancel)
        return one, link

    async def wait_for(self, *events: str) -> None:
        await _until(lambda: self.events == [*events], lambda: f"{events}, and not {self.events}")

    async def lease(self) -> Any:
        api = (await self.stack.enter_async_context(Link(self.plane))).api
        return await client.CoordinationV1Api(api).read_namespaced_lease("one", self.namespace)


async def _until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    try:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110  # the events are a plain list, so that their order is certain
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise TimeoutError(what()) from None


@pytest.fixture
async def candidates(control_plane: ControlPlane, namespace: str) -> AsyncIterator[Candidates]:
    async with AsyncExitStack() as stack:
        yield Candidates(control_plane, namespace, stack)


async def test_one_leads_and_hands_over_when_it_ends_in_good_order(candidates: Candidates) -> None:
    first, _ = await candidates.add("a", PATIENT)
    await candidates.wait_for("a leads")
    second, _ = await candidates.add("b", PATIENT)
    with pytest.raises(NotLeadingError, match="the Lease one is not held"):
        second.check()
    await first.close()
    await candidates.wait_for("a leads", "b leads")
    spec = (await candidates.lease()).spec
    assert (spec.holder_identity, spec.lease_transitions) == ("b", 1)
    with pytest.raises(NotLeadingError):
        first.check()


async def test_a_process_that_replaces_another_under_its_name_leads_at_once(candidates: Candidates) -> None:
    await candidates.add("a", PATIENT)
    await candidates.wait_for("a leads")
    await candidates.add("a", PATIENT)
    await candidates.wait_for("a leads", "a leads")


async def test_a_leader_whose_api_server_hangs_stops_before_another_leads(candidates: Candidates) -> None:
    short = Timing(lease=3, renew=1.5, retry=1)
    first, link = await candidates.add("a", short)
    await candidates.wait_for("a leads")
    await candidates.add("b", short)
    link.freeze()
    await candidates.wait_for("a leads", "a lost", "b leads")
    with pytest.raises(NotLeadingError):
        first.check()


async def test_broken_connections_end_no_election(candidates: Candidates) -> None:
    _, link = await candidates.add("a", PATIENT)
    await candidates.wait_for("a leads")
    before = (await candidates.lease()).spec.renew_time
    link.cut()
    while (await candidates.lease()).spec.renew_time == before:  # noqa: ASYNC110  # the test's own time limit ends it
        await asyncio.sleep(0.1)
    assert candidates.events == ["a leads"]


async def test_a_leader_whose_lease_was_taken_stops_at_once(candidates: Candidates) -> None:
    _, link = await candidates.add("a", PATIENT)
    await candidates.wait_for("a leads")
    await client.CoordinationV1Api(link.api).patch_namespaced_lease(
        "one", candidates.namespace, {"spec": {"holderIdentity": "thief"}}
    )
    await candidates.wait_for("a leads", "a lost")


async def test_a_clock_that_jumps_takes_no_lease_away(candidates: Candidates, monkeypatch: pytest.MonkeyPatch) -> None:
    await candidates.add("a", PATIENT)
    await candidates.wait_for("a leads")
    await candidates.add("b", PATIENT)
    tries = 0

    class Jumping:
        @staticmethod
        def time() -> float:
            nonlocal tries
            tries += 1
            return time.time() + 3600 * tries

    monkeypatch.setattr(leaderelection, "time", Jumping)
    await _until(lambda: tries > 8, lambda: f"more than {tries} looks at the clock")
    assert candidates.events == ["a leads"]


def _watch_requests(
    monkeypatch: pytest.MonkeyPatch, lost: Callable[[list[str]], bool] = lambda sent: False
) -> list[str]:
    """Return a list that gets the verb of each request about a Lease; of those that are `lost`, the answer is."""
    sent: list[str] = []

    def watch(name: str) -> None:
        plain = getattr(client.CoordinationV1Api, name)

        async def watched(*args: Any, **kwargs: Any) -> Any:
            sent.append(name.split("_")[0])
            is_lost, answer = lost(sent), await plain(*args, **kwargs)
            if is_lost:
                raise TimeoutError
            return answer

        monkeypatch.setattr(client.CoordinationV1Api, name, watched)

    for name in ("read_namespaced_lease", "create_namespaced_lease", "replace_namespaced_lease"):
        watch(name)
    return sent


async def test_a_leader_without_an_answer_renews_again_before_it_reads(
    candidates: Candidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request and a read that both wait for their deadline would leave no time for a second try."""
    sent = _watch_requests(monkeypatch, lambda sent: len(sent) == 4)
    await candidates.add("a", PATIENT)
    await _until(lambda: len(sent) > 7, lambda: f"more than {sent}")
    # The write whose answer was lost had come through, so the API server refuses the second one.
    assert sent[:6] == ["read", "create", "replace", "replace", "replace", "read"]
    assert candidates.events == ["a leads"]


async def test_a_leader_renews_with_one_request_and_reads_again_only_when_it_fails(
    candidates: Candidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that takes seconds for an answer would take two requests past the renew deadline."""
    sent = _watch_requests(monkeypatch)
    _, link = await candidates.add("a", PATIENT)
    await _until(lambda: len(sent) > 5, lambda: f"more than {sent}")
    assert sent[:5] == ["read", "create", "replace", "replace", "replace"]
    await client.CoordinationV1Api(link.api).patch_namespaced_lease(
        "one", candidates.namespace, {"metadata": {"labels": {"a": "b"}}}
    )
    await _until(lambda: "read" in sent[5:] and sent[-2:] == ["replace"] * 2, lambda: f"renewals after {sent}")
    assert candidates.events == ["a leads"]
