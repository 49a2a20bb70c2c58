"""A launcher's view of the other trainer pods: waits until all answer, then watches whether one is lost.

Every launcher answers GET /identity as long as its container lives, whatever its ranks do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from pydantic import ValidationError
from yarl import URL

from grpo_spec.contract import Member
from grpo_spec.reasons import Reason
from grpo_workload.launcher.identity import Ended, Identity
from grpo_workload.launcher.place import Place

logger = logging.getLogger(__name__)

# Reasons that all pods reach together. A peer that ended with one of them is not lost.
CLEAN_REASONS = frozenset({Reason.DONE, Reason.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Intervals and limits of a launcher, in seconds. The deadline of the rendezvous is the contract's."""

    answer: float = 5  # limit for one answer of a peer
    retry: float = 0.5  # interval between questions to a peer that has not answered yet
    report: float = 5  # interval between log lines about missing peers
    watch: float = 2  # interval between questions to a peer while ranks run
    # A peer is lost after this time without an answer. Longer than the kubelet's first restart of a container takes.
    lost: float = 30
    # A pod that still holds after this time is probably kept for another attempt: others are deleted once it is known
    # which pod has failed first.
    ahead: float = 2
    # A launcher that ended answers for this time. Several times `watch`, so that every peer sees how it ended.
    linger: float = 15
    raised: float = 20  # limit for a rank that raised to end its process: it closes engines and connections meanwhile
    rank_grace: float = 5  # time between SIGTERM and SIGKILL for the other ranks of a failed one


@dataclass(frozen=True, slots=True)
class LostPeer:
    """A lost peer: the reason and message of this pod's outcome. The message names the peer."""

    reason: Reason
    message: str


class UnreachableError(Exception):
    """A peer did not answer as expected. The message begins with what failed: DNS, TCP, HTTP or attempt."""


@dataclass(slots=True)
class Peers:
    """The other trainer pods, as seen from the pod at `place`."""

    place: Place
    session: aiohttp.ClientSession
    timing: Timing
    clock: Callable[[], float] = time.monotonic
    missing: dict[str, str] = field(default_factory=dict)  # pods not reached yet, each with the cause
    uids: dict[str, str] = field(default_factory=dict)  # UID of each pod when it first answered
    ended_cleanly: set[str] = field(default_factory=set)
    # How peers ended, and when (seconds since 1970): one may be gone when a rank of this pod has ended, too.
    ended: dict[str, tuple[LostPeer, float]] = field(default_factory=dict)

    async def ask(self, member: Member) -> Identity:
        """Return the identity of a member. Raises UnreachableError unless it answers as that pod of this attempt."""
        url = URL.build(scheme="http", host=await self._resolve(member), port=member.status_port, path="/identity")
        address = f"{member.host}:{member.status_port}"
        try:
            async with self.session.get(url, raise_for_status=True) as response:
                identity = Identity.model_validate_json(await response.read())
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(f"TCP: {address} cannot be reached ({error.os_error.strerror or error})") from error
        except TimeoutError as error:
            raise UnreachableError(f"TCP: {address} gave no answer within {self.timing.answer:g} s") from error
        except (aiohttp.ClientError, ValidationError) as error:
            raise UnreachableError(f"HTTP: {address} does not answer as a launcher ({type(error).__name__})") from error
        if (identity.pod, identity.attempt) != (member.pod, self.place.contract.attempt):
            raise UnreachableError(
                f"attempt: {address} answers as pod {identity.pod} of attempt {identity.attempt}, "
                f"expected pod {member.pod} of attempt {self.place.contract.attempt}"
            )
        return identity

    async def _resolve(self, member: Member) -> str:
        try:
            async with asyncio.timeout(self.timing.answer):
                found = await asyncio.get_running_loop().getaddrinfo(
                    member.host, member.status_port, type=socket.SOCK_STREAM
                )
        except socket.gaierror as error:
            raise UnreachableError(f"DNS: {member.host} does not resolve ({error.strerror})") from error
        except TimeoutError as error:
            raise UnreachableError(f"DNS: no answer for {member.host} within {self.timing.answer:g} s") from error
        return str(found[0][4][0])

    async def gather(self) -> LostPeer | None:
        """Wait until every member, including this one, resolves and answers: the rendezvous.

        Returns None when all answer, else what is wrong. The contract's limit counts from the last one that answered:
        nodes may become free one after another.
        """
        members = self.place.contract.members
        self.missing.update({member.pod: "not tried yet" for member in members})
        limit = self.place.contract.timeout_seconds
        deadline = self.clock() + limit
        pending = tasks = {asyncio.create_task(self._reach(member)) for member in members}
        next_report = self.clock() + self.timing.report
        try:
            while pending:
                wait = max(0.0, min(next_report, deadline) - self.clock())
                done, pending = await asyncio.wait(pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if loss := task.result():
                        return loss
                    deadline = self.clock() + limit
                if pending and self.clock() >= deadline:
                    return LostPeer(Reason.PEERS_MISSING, f"{self._who_is_missing()} after {limit} s")
                if self.clock() >= next_report:
                    logger.warning("waiting: %s", self._who_is_missing())
                    next_report += self.timing.report
        finally:
            for task in tasks:
                task.cancel()
        return None

    async def _reach(self, member: Member) -> LostPeer | None:
        while True:
            try:
                identity = await self.ask(member)
            except UnreachableError as error:
                self.missing[member.pod] = str(error)
                await asyncio.sleep(self.timing.retry)
                continue
            if identity.ended:
                cause = _cause(identity.ended)
                return LostPeer(Reason.PEER_LOST, f"pod {member.pod} ended before all pods were reached: {cause}")
            self.uids[member.pod] = identity.pod_uid
            del self.missing[member.pod]
            return None

    def _who_is_missing(self) -> str:
        causes = "; ".join(f"pod {pod}: {cause}" for pod, cause in self.missing.items())
        return f"{len(self.missing)} of {len(self.place.contract.members)} pods not reached ({causes})"

    async def watch(self) -> LostPeer:
        """Watch the master, or as the master all peers, while ranks run. Returns only when one is lost."""
        watched = self.place.others if self.place.is_master else (self.place.contract.master,)
        tasks = [asyncio.create_task(self._watch_one(member)) for member in watched]
        try:
            for task in asyncio.as_completed(tasks):
                if loss := await task:
                    return loss
            return await asyncio.Future()
        finally:
            for one in tasks:
                one.cancel()

    async def _watch_one(self, member: Member) -> LostPeer | None:
        answered = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.watch)
            try:
                identity = await self.ask(member)
            except UnreachableError as error:
                silence = time.monotonic() - answered
                if silence > self.timing.lost:
                    return LostPeer(Reason.PEER_LOST, f"pod {member.pod} has not answered for {silence:.0f} s: {error}")
                continue
            answered = time.monotonic()
            if loss := self._loss(member, identity):
                if identity.ended:
                    self.ended[member.pod] = loss, time.time() - identity.ended.seconds_ago
                return loss
            if identity.ended:
                self.ended_cleanly.add(member.pod)
                return None

    def _loss(self, member: Member, identity: Identity) -> LostPeer | None:
        first_uid = self.uids[member.pod]
        if identity.pod_uid != first_uid:
            change = f"its UID was {first_uid} and is now {identity.pod_uid}"
            return LostPeer(Reason.PEER_LOST, f"pod {member.pod} was replaced: {change}")
        if identity.ended and identity.ended.reason not in CLEAN_REASONS:
            return LostPeer(Reason.PEER_LOST, f"pod {member.pod} ended with {_cause(identity.ended)}")
        return None

    async def earlier_failure(self, failed_at: float) -> LostPeer | None:
        """Find a peer that was lost before `failed_at`, when a rank of this pod failed, and so is the likely cause.

        `failed_at` is in seconds since 1970.
        """
        suspects = [member for member in self.place.others if member.pod not in self.ended_cleanly]
        answers = await asyncio.gather(*(self.ask(member) for member in suspects), return_exceptions=True)
        silent: list[LostPeer] = []
        for member, answer in zip(suspects, answers, strict=True):
            if isinstance(answer, UnreachableError):
                gone = LostPeer(Reason.PEER_LOST, f"pod {member.pod} is gone: {answer}")
                cause, at = self.ended.get(member.pod, (gone, -math.inf))
                if at < failed_at:
                    silent.append(cause)
            elif isinstance(answer, BaseException):
                raise answer
            elif (loss := self._loss(member, answer)) and (
                answer.ended is None or time.time() - answer.ended.seconds_ago < failed_at
            ):
                return loss
        return silent[0] if silent else None

    async def linger(self) -> None:
        """Keep answering, so that all peers see how this pod ended.

        Ends when each peer's outcome is final or the peer is gone, at most after `timing.linger`.
        """
        try:
            async with asyncio.timeout(self.timing.linger):
                await asyncio.gather(*(self._until_final(member) for member in self.place.others))
        except TimeoutError:
            logger.info("other pods are still running; they have seen how this one ended")

    async def _until_final(self, member: Member) -> None:
        try:
            while True:
                ended = (await self.ask(member)).ended
                if ended and ended.is_final:
                    return
                await asyncio.sleep(self.timing.retry)
        except UnreachableError as error:
            logger.info("pod %s is gone: %s", member.pod, error)


def _cause(ended: Ended) -> str:
    rank = "" if ended.rank is None else f" of rank {ended.rank}"
    return f"{ended.reason}{rank}: its own outcome says why"


@asynccontextmanager
async def peers_of(place: Place, timing: Timing) -> AsyncIterator[Peers]:
    """Open a session to the peers. It resolves and connects for every question, because pods change their addresses."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=timing.answer)
    ) as session:
        yield Peers(place, session, timing)
