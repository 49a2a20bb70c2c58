"""What a launcher knows of the other pods: who they are, whether all are there, whether one is lost.

Every launcher answers GET /identity, for as long as its container lives and whatever its ranks do.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from pydantic import ValidationError
from yarl import URL

from grpo_workload.contract import ExitCode, Member
from grpo_workload.section import Section
from grpo_workload.world import Place

logger = logging.getLogger(__name__)

# Ends after which a pod's peers end in the same way, by themselves: they are never held against it.
AGREED_ENDS = frozenset({"Done", "Stopped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Intervals and limits of a launcher, in seconds; the gate's deadline is the contract's."""

    answer: float = 5  # for one answer of a peer
    retry: float = 0.5  # between two attempts of the gate
    report: float = 5  # between two log lines on who is missing
    watch: float = 2  # between two looks at a peer while ranks run
    lost: float = 30  # a peer that does not answer for so long is lost: longer than the kubelet's first restart of a container
    linger: float = 15  # an ended launcher still answers for so long: several times `watch`, so that every peer learns of it
    rank_grace: float = 5  # between SIGTERM and SIGKILL for the ranks beside a failed one


class Ended(Section):
    """How a launcher ended, told to its peers."""

    reason: str
    exit_code: ExitCode
    message: str
    seconds_ago: float  # an age and not a time: pods' clocks differ
    recorded: bool  # its outcome is final: until then it may still ask its peers which of them failed first


class Identity(Section):
    """The answer to GET /identity."""

    pod: str
    pod_uid: str
    epoch: int
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """Why this pod cannot go on: the reason and message of its outcome, which name the peer."""

    reason: str
    message: str


class UnreachableError(Exception):
    """A peer did not give the answer expected of it; the text says which layer failed: DNS, TCP, HTTP or the epoch."""


@dataclass(slots=True)
class Peers:
    """The other pods as seen from `place`. `missing` maps a pod that the gate has not reached to the cause."""

    place: Place
    session: aiohttp.ClientSession
    timing: Timing
    missing: dict[str, str] = field(default_factory=dict)
    uids: dict[str, str] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)

    async def ask(self, member: Member) -> Identity:
        """The identity of a member. Raises UnreachableError when it has none for this epoch."""
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
        if (identity.pod, identity.epoch) != (member.pod, self.place.contract.epoch):
            raise UnreachableError(
                f"epoch: {address} answers as pod {identity.pod} of epoch {identity.epoch}, "
                f"expected pod {member.pod} of epoch {self.place.contract.epoch}"
            )
        return identity

    async def _resolve(self, member: Member) -> str:
        try:
            async with asyncio.timeout(self.timing.answer):
                found = await asyncio.get_running_loop().getaddrinfo(member.host, member.status_port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise UnreachableError(f"DNS: {member.host} does not resolve ({error.strerror})") from error
        except TimeoutError as error:
            raise UnreachableError(f"DNS: no answer for {member.host} within {self.timing.answer:g} s") from error
        return str(found[0][4][0])

    async def gather(self) -> Loss | None:
        """Wait until every member, this one included, resolves and answers; None when all are there within the contract's deadline."""
        members = self.place.contract.members
        self.missing.update({member.pod: "not tried yet" for member in members})
        limit = self.place.contract.timeout_seconds
        deadline = time.monotonic() + limit
        pending = attempts = {asyncio.create_task(self._reach(member)) for member in members}
        next_report = time.monotonic() + self.timing.report
        try:
            while pending:
                wait = max(0.0, min(next_report, deadline) - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    if loss := attempt.result():
                        return loss
                if pending and time.monotonic() >= deadline:
                    return Loss("PeersMissing", f"{self._who_is_missing()} after {limit} s")
                if time.monotonic() >= next_report:
                    logger.warning("waiting: %s", self._who_is_missing())
                    next_report += self.timing.report
        finally:
            for attempt in attempts:
                attempt.cancel()
        return None

    async def _reach(self, member: Member) -> Loss | None:
        while True:
            try:
                identity = await self.ask(member)
            except UnreachableError as error:
                self.missing[member.pod] = str(error)
                await asyncio.sleep(self.timing.retry)
                continue
            if identity.ended:
                return Loss("PeerLost", f"pod {member.pod} ended before the world was complete: {_told(identity.ended)}")
            self.uids[member.pod] = identity.pod_uid
            del self.missing[member.pod]
            return None

    def _who_is_missing(self) -> str:
        causes = "; ".join(f"pod {pod}: {cause}" for pod, cause in self.missing.items())
        return f"{len(self.missing)} of {len(self.place.contract.members)} pods not reached ({causes})"

    async def watch(self) -> Loss:
        """Look at the master, or from the master at everybody, while ranks run; returns only when a peer is lost."""
        watched = self.place.others if self.place.is_master else (self.place.contract.master,)
        looks = [asyncio.create_task(self._watch_one(member)) for member in watched]
        try:
            for look in asyncio.as_completed(looks):
                if loss := await look:
                    return loss
            return await asyncio.Future()
        finally:
            for task in looks:
                task.cancel()

    async def _watch_one(self, member: Member) -> Loss | None:
        answered = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.watch)
            try:
                identity = await self.ask(member)
            except UnreachableError as error:
                silence = time.monotonic() - answered
                if silence > self.timing.lost:
                    return Loss("PeerLost", f"pod {member.pod} has not answered for {silence:.0f} s: {error}")
                continue
            answered = time.monotonic()
            if loss := self._judge(member, identity):
                return loss
            if identity.ended:
                self.agreed.add(member.pod)
                return None

    def _judge(self, member: Member, identity: Identity) -> Loss | None:
        pinned = self.uids[member.pod]
        if identity.pod_uid != pinned:
            return Loss("PeerLost", f"pod {member.pod} was replaced: its UID was {pinned} and is now {identity.pod_uid}")
        if identity.ended and identity.ended.reason not in AGREED_ENDS:
            return Loss("PeerLost", f"pod {member.pod} ended with {_told(identity.ended)}")
        return None

    async def culprit(self, failed_at: float) -> Loss | None:
        """A peer that was lost before a rank of ours failed (`failed_at`, seconds since the epoch), and so is the likely cause."""
        suspects = [member for member in self.place.others if member.pod not in self.agreed]
        answers = await asyncio.gather(*(self.ask(member) for member in suspects), return_exceptions=True)
        silent: list[Loss] = []
        for member, answer in zip(suspects, answers, strict=True):
            if isinstance(answer, UnreachableError):
                silent.append(Loss("PeerLost", f"pod {member.pod} is gone: {answer}"))
            elif isinstance(answer, BaseException):
                raise answer
            elif (loss := self._judge(member, answer)) and (answer.ended is None or time.time() - answer.ended.seconds_ago < failed_at):
                return loss
        return silent[0] if silent else None

    async def linger(self) -> None:
        """Keep answering until every other pod's outcome is final or it is gone, `timing.linger` at most: all learn how this one ended."""
        try:
            async with asyncio.timeout(self.timing.linger):
                await asyncio.gather(*(self._until_recorded(member) for member in self.place.others))
        except TimeoutError:
            logger.info("other pods are still running; they have seen how this one ended")

    async def _until_recorded(self, member: Member) -> None:
        try:
            while not ((ended := (await self.ask(member)).ended) and ended.recorded):  # noqa: ASYNC110  # it happens in another pod
                await asyncio.sleep(self.timing.retry)
        except UnreachableError as error:
            logger.info("pod %s is gone: %s", member.pod, error)


def _told(ended: Ended) -> str:
    return f"{ended.reason}: {ended.message}"


@asynccontextmanager
async def peers_of(place: Place, timing: Timing) -> AsyncIterator[Peers]:
    """Peers whose hosts are resolved anew, and connections made anew, at every question: pods change their addresses."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timing.answer)) as session:
        yield Peers(place, session, timing)
