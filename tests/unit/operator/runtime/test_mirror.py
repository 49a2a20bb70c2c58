"""The mirror follows what it is told, however late, often or disordered, and whenever answers to own writes come.

Asserted: it never shows an older state after a newer one, nor what was deleted; each pod's end is told once; a job is
woken by what matters and by nothing else; what it holds does not grow; and in the end it shows what the server has, if
events were lost then after the next list.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo_operator.api import names
from grpo_operator.decide.observe import Child
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.mirror import DisorderError, Mirror
from grpo_operator.runtime.scopes import Scope
from support.control_plane.children import MANAGED, bare_job, child, end, mark, truth
from support.control_plane.memory_store import Change, Object, Selection, Store, disturb

KINDS = ("Pod", "ConfigMap", "StatefulSet")
NAMESPACES, JOBS = ("one", "two"), ("a", "b")
Place = tuple[str, str, str]
PLACES = st.tuples(*map(st.sampled_from, (KINDS, NAMESPACES, ("x", "y"))))
WHICH = st.integers(0, 5)


class Followed(RuleBasedStateMachine):
    """The watches are legal: every event comes, in order. Answers to writes come at any time, or never."""

    @initialize(namespaced=st.booleans())
    def begin(self, namespaced: bool) -> None:
        self.store, self.marks = Store(), count(1)
        self.woken: set[Key] = set()
        self.ends: list[tuple[Key, ObservedPod]] = []
        self.shown_jobs: set[Key] = set()
        self.mirror = Mirror(
            [Scope(kind, one) for kind in KINDS for one in (NAMESPACES if namespaced else (None,))],
            self.woken.add,
            lambda key, pod: self.ends.append((key, pod)),
            lambda key, raw: self.shown_jobs.add(key),
            self.shown_jobs.discard,
        )
        self.left: list[tuple[int, Key, ObservedPod]] = []
        self.answers: list[Object] = []
        self.shown: dict[Place, int] = {}
        self.there: set[Place] = set()
        self.pending: dict[int, list[Object]] = {}
        self.lists: dict[int, tuple[list[Object], int]] = {}
        self.first: dict[int, int] = {}
        self.may_miss_ends = self.are_events_lost = False
        self.store.listeners.append(self._changed)
        self.uids = {(namespace, job): f"{job}-0" for namespace in NAMESPACES for job in JOBS}
        for place, uid in self.uids.items():
            self.mirror.keep_job(bare_job(*place, uid, self.store.version))

    # What happens in the cluster

    @rule(place=PLACES, job=st.sampled_from(JOBS), old=st.booleans(), is_managed=st.sampled_from([True, True, False]))
    def written(self, place: Place, job: str, old: bool, is_managed: bool) -> None:
        uid = "earlier" if old else self.uids[place[1], job]
        self.store.put(child(*place, job=job, uid=uid, mark=next(self.marks), is_managed=is_managed))

    @rule(place=PLACES, job=st.sampled_from(JOBS), old=st.booleans())
    def relabelled(self, place: Place, job: str, old: bool) -> None:
        """Give a child to another job, or to an earlier one of the name, and change nothing else."""
        if (raw := self.store.get(*place)) is not None:
            uid = "earlier" if old else self.uids[place[1], job]
            labels = raw["metadata"]["labels"] | {names.LABEL_JOB: job, names.LABEL_JOB_UID: uid}
            self.store.edit(raw, metadata={"labels": labels})

    @rule(place=PLACES, job=st.sampled_from(JOBS))
    def written_by_the_operator(self, place: Place, job: str) -> None:
        if place[0] != "Pod":
            made = child(*place, job=job, uid=self.uids[place[1], job], mark=next(self.marks))
            self.answers.append(self.store.put(made))

    @rule(place=PLACES, again=st.booleans())
    def deleted(self, place: Place, again: bool) -> None:
        if self.store.get(*place) is not None:
            self.store.remove(*place)
            if again:
                self.written(place, "a", old=False, is_managed=True)

    @rule(namespace=st.sampled_from(NAMESPACES), job=st.sampled_from(JOBS), is_end_seen=st.booleans())
    def a_job_is_recreated(self, namespace: str, job: str, is_end_seen: bool) -> None:
        if is_end_seen:
            self.mirror.drop_job(Key(namespace, job, self.uids[namespace, job]))
        self.store.version += 1
        self.uids[namespace, job] += "+"
        self.mirror.keep_job(bare_job(namespace, job, self.uids[namespace, job], self.store.version))
        self.may_miss_ends = True

    # What the mirror is told

    @rule(which=WHICH, number=st.integers(1, 5))
    def events_come(self, which: int, number: int) -> None:
        if (index := self._watched(which)) is not None:
            while number > 0 and self.pending[index]:
                self._tell(index, self.pending[index].pop(0))
                number -= 1

    @rule(which=WHICH)
    def a_bookmark_comes(self, which: int) -> None:
        if (index := self._watched(which)) is not None and not self.pending[index]:
            metadata = {"resourceVersion": str(self.store.version)}
            self._tell(index, {"type": "BOOKMARK", "object": {"metadata": metadata}})

    @rule(which=WHICH)
    def a_watch_is_continued(self, which: int) -> None:
        if (index := self._watched(which)) is not None:
            version = self.mirror.scopes[index].version
            self.pending[index] = [*self.store.events(self._selection(index), version)]

    @rule(which=WHICH)
    def a_list_begins(self, which: int) -> None:
        index = which % len(self.mirror.scopes)
        self.lists[index] = self.store.select(self._selection(index)), self.store.version

    @precondition(lambda self: self.lists)
    @rule(which=WHICH)
    def a_list_ends(self, which: int) -> None:
        self._end_list(sorted(self.lists)[which % len(self.lists)])

    @precondition(lambda self: self.answers)
    @rule(which=WHICH)
    def an_answer_comes(self, which: int) -> None:
        with self._waking_what_changes():
            self.mirror.keep(self.answers.pop(which % len(self.answers)))

    # What holds at every moment

    @invariant()
    def no_state_is_followed_by_an_older_one_and_what_is_deleted_stays_away(self) -> None:
        seen = {place: mark(value) for where in self.uids for place, (_, value) in self._seen(*where).items()}
        for place, number in seen.items():
            assert number >= self.shown.get(place, 0)
        gone = self.there - seen.keys()
        self.shown |= seen | {place: self.shown[place] + 1 for place in gone}
        self.there = set(seen)

    @invariant()
    def jobs_are_shown_from_their_first_state_to_their_end(self) -> None:
        assert self.shown_jobs == set(self.mirror.job_keys())

    @invariant()
    def it_is_synced_once_every_scope_was_listed(self) -> None:
        assert self.mirror.synced.is_set() == (len(self.first) == len(self.mirror.scopes))

    @invariant()
    def it_holds_nothing_but_objects_each_once(self) -> None:
        held = sum(number for kind, number in self.mirror.count().items() if kind != names.KIND)
        assert sum(len(places) for places in self.mirror._of_jobs.values()) == held
        assert all(self.mirror._of_jobs.values())

    def teardown(self) -> None:
        if not hasattr(self, "mirror"):
            return
        for index in range(len(self.mirror.scopes)):
            self._catch_up(index)
        while self.answers:
            self.mirror.keep(self.answers.pop())
        for (namespace, job), uid in self.uids.items():
            key = Key(namespace, job, uid)
            wanted = [one for kind in KINDS for one in truth(self.store, kind, namespace, job)]
            assert sorted([*self.mirror.pods(key), *self.mirror.others(key)], key=repr) == sorted(wanted, key=repr)
        told = Counter((key, pod.uid) for key, pod in self.ends)
        assert not told - Counter((key, pod.uid) for _, key, pod in self.left), "no end is told that did not happen"
        if not self.may_miss_ends:
            due = [(key, pod) for version, key, pod in self.left if version > self.first[0]]
            assert sorted(map(repr, self.ends)) == sorted(map(repr, due)), "each end is told once, with its final state"

    # Tools

    def _catch_up(self, index: int) -> None:
        """Deliver what is under way."""
        if index not in self.first:
            self.a_list_begins(index)
        if index in self.lists:
            self._end_list(index)
        while self.pending[index]:
            self._tell(index, self.pending[index].pop(0))

    def _watched(self, which: int) -> int | None:
        index = which % len(self.mirror.scopes)
        return index if index in self.pending and index not in self.lists else None

    def _selection(self, index: int) -> Selection:
        return Selection(self.mirror.scopes[index].kind, self.mirror.scopes[index].namespace, MANAGED)

    def _end_list(self, index: int) -> None:
        objects, version = self.lists.pop(index)
        self.may_miss_ends |= index in self.first or self.mirror.scopes[index].namespace is not None
        self.first.setdefault(index, version)
        scope = self.mirror.scopes[index]
        with self._waking_what_changes():
            self.mirror.end_list(scope, self.mirror.list_part(scope, objects), str(version))
        self.pending[index] = [*self.store.events(self._selection(index), version)]

    def _tell(self, index: int, event: Object) -> None:
        with self._waking_what_changes():
            self.mirror.changed(self.mirror.scopes[index], event["type"], event["object"])

    @contextmanager
    def _waking_what_changes(self) -> Iterator[None]:
        before = {where: self._seen(*where) for where in self.uids}
        self.woken.clear()
        yield
        changed = {Key(*where, uid) for where, uid in self.uids.items() if self._seen(*where) != before[where]}
        assert changed <= self.woken
        assert self.woken <= changed or self.are_events_lost

    def _seen(self, namespace: str, job: str) -> dict[Place, tuple[str, ObservedPod | Child]]:
        key = Key(namespace, job, self.uids[namespace, job])
        pods = {("Pod", namespace, pod.name): (uid, pod) for uid, pod in self.mirror.pods(key)}
        return pods | {(one.kind, namespace, one.name): (uid, one) for uid, one in self.mirror.others(key)}

    def _changed(self, change: Change) -> None:
        for index, pending in self.pending.items():
            if (event := self._selection(index).event(change)) is not None:
                pending.append(event)
        if (ended := end(change)) is not None and self.uids[ended[0].namespace, ended[0].name] == ended[0].uid:
            self.left.append((change.version, *ended))


class Disturbed(Followed):
    """Events are also lost, repeated and exchanged. Out of order, they cause a list."""

    @rule(which=WHICH, at=st.integers(0, 3), how=st.sampled_from(["lose", "repeat", "exchange"]))
    def events_are_disturbed(self, which: int, at: int, how: str) -> None:
        index = self._watched(which)
        if index is None or not self.pending[index]:
            return
        self.may_miss_ends = self.are_events_lost = True
        disturb(self.pending[index], at, how)

    def _tell(self, index: int, event: Object) -> None:
        try:
            super()._tell(index, event)
        except DisorderError:
            self.a_list_begins(index)
            self._end_list(index)

    def _catch_up(self, index: int) -> None:
        self.a_list_begins(index)
        super()._catch_up(index)


Followed.TestCase.settings = Disturbed.TestCase.settings = settings(stateful_step_count=40)
TestFollowed, TestDisturbed = Followed.TestCase, Disturbed.TestCase
