"""Faults of the API server and of the operator while the soak works."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

from grpo_devcluster.controlplane import ControlPlane
from support.control_plane.operators import Operator

KINDS = ("restart api", "expire watches", "reboot", "stop api", "freeze operator", "second operator", "kill operator")


class Etcd:
    """The control plane's etcd, through its HTTP gateway."""

    def __init__(self, plane: ControlPlane) -> None:
        self._url = f"http://127.0.0.1:{plane.endpoints.etcd}/v3/kv"

    def compact(self) -> None:
        """Forget all revisions but the newest."""
        self._post("compaction", revision=self._post("range", key=_coded("/"))["header"]["revision"], physical=True)

    def keys(self) -> list[str]:
        """Return the keys of all objects of Kubernetes."""
        found = self._post("range", key=_coded("/registry/"), range_end=_coded("/registry0"), keys_only=True)
        return [base64.b64decode(one["key"]).decode() for one in found.get("kvs", ())]

    def _post(self, what: str, **request: Any) -> dict[str, Any]:
        body = urllib.request.Request(f"{self._url}/{what}", json.dumps(request).encode())
        with urllib.request.urlopen(body, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def _coded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


class Faults:
    """Brings faults about, one of each kind before any comes again."""

    def __init__(self, plane: ControlPlane, random: Random, note: Callable[[str], None]) -> None:
        self._plane, self._random, self._note = plane, random, note
        self._deck: list[str] = []
        self._later: list[tuple[float, str, Callable[[], None]]] = []
        self.api_since = ""  # when the API server was started last
        self.counts: Counter[str] = Counter()

    def meet(self, operator: Operator, second: Operator, kinds: Sequence[str]) -> None:
        """Begin with operators: one that always runs, and one that comes and goes."""
        self._operator, self._second, self._kinds, self._deck = operator, second, kinds, []

    def next(self) -> None:
        """Bring one fault about."""
        self._deck = self._deck or self._random.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        self._note(f"FAULT {kind}")
        self.counts[kind] += 1
        getattr(self, f"_{kind.replace(' ', '_')}")()

    def go_on(self, *, until_over: bool = False) -> None:
        """Undo faults whose time has come, or all of them, and start again what has ended by itself.

        The scheduler ends itself when it has missed that a pod was replaced by one of the same name, and an operator
        when it has lost the Lease.
        """
        for daemon in self._plane.daemons():
            if daemon.pid() is None:
                self._note(f"{daemon.name} has ended")
                daemon.start()
        for operator in (self._operator, self._second):
            if operator.has_ended:
                self._note(f"{operator.log.name} has ended")
                self.counts["an operator ended itself"] += 1
                operator.kill()
                operator.start()
        for one in sorted(self._later, key=lambda one: one[0]):
            if until_over or one[0] <= time.monotonic():
                self._later.remove(one)
                self._note(f"FAULT over: {one[1]}")
                one[2]()

    def replace_controllers(self) -> None:
        """Let Kubernetes' controllers begin again, as with a new leader.

        Garbage collection takes an owner that ended while its watch was broken for one that is there, and the
        StatefulSets' controller asks ever more rarely whether its own watch has caught up.
        """
        self._note("Kubernetes' controllers begin again")
        (manager,) = [daemon for daemon in self._plane.daemons() if daemon.name == "kube-controller-manager"]
        manager.stop(grace=0)  # `go_on` starts it

    def _after(self, seconds: tuple[float, float], what: str, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + self._random.uniform(*seconds), what, act))

    def _restart_api(self) -> None:
        apiserver = self._plane.daemons()[1]
        apiserver.stop(grace=0)
        time.sleep(self._random.uniform(0, 5))
        self.api_since = datetime.now(UTC).isoformat()
        apiserver.start()

    def _expire_watches(self) -> None:
        """Restart the API server while etcd forgets all older revisions: no watch can go on where it was."""
        Etcd(self._plane).compact()
        self._restart_api()

    def _reboot(self) -> None:
        """Restart all of the control plane but etcd: its other programs begin with fresh lists too."""
        _, *others = self._plane.daemons()
        for daemon in others:
            daemon.stop(grace=0)
        self._restart_api()

    def _stop_api(self) -> None:
        """Stop it for longer than requests of the operator wait: connections stay open, and nobody answers."""
        pid = self._plane.daemons()[1].pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(2, 18))
        os.kill(pid, signal.SIGCONT)

    def _freeze_operator(self) -> None:
        """The operator's knowledge grows old, while the work goes on."""
        self._operator.signal(signal.SIGSTOP)
        self._after((3, 25), "freeze operator", lambda: self._operator.signal(signal.SIGCONT))

    def _kill_operator(self) -> None:
        self.go_on(until_over=True)
        self._operator.kill()
        self._after((0, 10), "kill operator", self._operator.start)

    def _second_operator(self) -> None:
        self._second.start()
        self._after((10, 30), "second operator", self._second.kill)
