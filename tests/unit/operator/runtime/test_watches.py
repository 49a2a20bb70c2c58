"""Watches keep the mirror up to date, whatever becomes of them: they end, break, expire, lag, lose and disorder events.

The API server is in memory and time is virtual. Asserted: once faults have stopped the mirror shows what the server
has, if events were lost then after the next list; and what a watch may do never looks like disorder.
"""

import asyncio
from itertools import count
from typing import Any

import aiohttp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo_operator.runtime import watches as module
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.watches import RELIST_SECONDS
from support.control_plane.children import child
from support.control_plane.followed import KEYS, KINDS, LAST_BACKOFF, FollowedServer
from support.control_plane.memory_api import END, Stream, failure
from support.control_plane.memory_store import disturb
from support.control_plane.virtual_time import VirtualTimeLoop

BROKEN = (aiohttp.ClientPayloadError("cut off"), TimeoutError(), ValueError("no JSON"), failure(500, "etcd"))


@pytest.fixture(autouse=True)
def lists_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 2)


class Followed(RuleBasedStateMachine):
    """Watches and lists behave as they may: late, ended, broken, expired, refused."""

    @initialize(namespaced=st.booleans(), objects=st.integers(0, 4))
    def begin(self, namespaced: bool, objects: int) -> None:
        self.marks, self.disturbed = count(1), False
        self.loop = VirtualTimeLoop()
        self.world = FollowedServer(*KINDS, namespaces=("one", "two") if namespaced else (None,))
        for number in range(objects):
            self.written(KINDS[number % 2], KEYS[number % 3], f"x{number}")
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.world.watches.start()

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    # What happens in the cluster

    @rule(kind=st.sampled_from(KINDS), key=st.sampled_from(KEYS), name=st.sampled_from(["x0", "x1", "x2", "x3"]))
    def written(self, kind: str, key: Key, name: str) -> None:
        self.world.store.put(child(kind, key.namespace, name, job=key.name, uid=key.uid, mark=next(self.marks)))

    @rule(which=st.integers(0, 9))
    def deleted(self, which: int) -> None:
        if places := sorted(self.world.store.objects):
            self.world.store.remove(*places[which % len(places)])

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 20.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.wait(seconds)

    # What becomes of watches and lists

    @rule(which=st.integers(0, 9), held=st.booleans(), count=st.integers(0, 3))
    def a_watch_lags(self, which: int, held: bool, count: int) -> None:
        if stream := self._stream(which):
            self.world.api.held_kinds ^= {stream.selection.kind} if held else set()
            stream.let_through(count)

    @rule(which=st.integers(0, 9))
    def a_bookmark_comes(self, which: int) -> None:
        if stream := self._stream(which):
            stream.bookmark(self.world.store.version)

    @rule(which=st.integers(0, 9), how=st.sampled_from([END, *BROKEN]))
    def a_watch_stops(self, which: int, how: Any) -> None:
        if stream := self._stream(which):
            stream.stop(how)

    @rule(which=st.integers(0, 9), as_event=st.booleans())
    def a_watch_expires(self, which: int, as_event: bool) -> None:
        if stream := self._stream(which):
            self.world.store.compact()
            error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
            stream.stop(error if as_event else END)

    @rule(error=st.sampled_from(BROKEN), number=st.integers(1, 3), compactions=st.integers(0, 2))
    def the_server_fails(self, error: Exception, number: int, compactions: int) -> None:
        self.world.api.failures += [error] * number
        self.world.api.compactions += compactions

    @invariant()
    def all_scopes_are_followed(self) -> None:
        assert not any(task.done() for task in self.world.watches.tasks)
        versions = [scope.version for scope in self.world.mirror.scopes]
        assert self.world.mirror.synced.is_set() == all(version >= 0 for version in versions)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.api.failures.clear()
        world.api.compactions = 0
        world.api.held_kinds.clear()
        for stream in world.api.streams:
            stream.let_through()
        self.settle()
        assert world.differences() == []
        assert world.mirror.synced.is_set()
        if not self.disturbed:
            assert world.lists("disorder") == 0, "what a watch may do does not look like disorder"
        self.loop.run_until_complete(world.watches.close())
        assert world.api.streams == []
        self.loop.close()

    def settle(self) -> None:
        self.wait(LAST_BACKOFF)

    def _stream(self, which: int) -> Stream | None:
        streams = self.world.api.streams
        return streams[which % len(streams)] if streams else None


class Disturbed(Followed):
    """Watches also lose, repeat and exchange events: what is lost is there after the next list, within the hour."""

    @rule(which=st.integers(0, 9), at=st.integers(0, 3), how=st.sampled_from(["lose", "repeat", "exchange"]))
    def events_are_disturbed(self, which: int, at: int, how: str) -> None:
        stream = self._stream(which)
        if stream is not None and stream.pending:
            self.disturbed = True
            disturb(stream.pending, at, how)

    def settle(self) -> None:
        for _ in range(3):
            for stream in self.world.api.streams:
                stream.stop(END)
            self.wait(RELIST_SECONDS / 2)
        for stream in self.world.api.streams:
            stream.stop(END)
        self.wait(LAST_BACKOFF)


Followed.TestCase.settings = Disturbed.TestCase.settings = settings(stateful_step_count=20)
TestFollowed, TestDisturbed = Followed.TestCase, Disturbed.TestCase
