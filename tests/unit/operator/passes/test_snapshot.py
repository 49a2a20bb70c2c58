"""A spec is read once, as long as nothing that it is read from changes."""

import copy
from typing import Any

import pytest

from grpo_operator.api.names import API_VERSION, DEFAULTS_KINDS, DEFAULTS_NAME, LABEL_QUEUE, Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.conditions import set_condition
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes.jobs import REMEMBERED, Jobs
from grpo_operator.passes.snapshot import Snapshot, SnapshotReader
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ObstacleError
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.scopes import Scope
from grpo_spec.reasons import Reason
from grpo_spec.schema import dump
from support.control_plane.jobs import NOW, spec
from support.control_plane.memory_api import MemoryApi
from support.control_plane.memory_store import Store


def _raw(**changes: Any) -> dict[str, Any]:
    return {"metadata": {"generation": 1, "resourceVersion": "1"}, "spec": spec(**changes)}


class Looks:
    """Looks at jobs of which the mirror holds no children."""

    def __init__(self, *scopes: Scope) -> None:
        self.store = Store()
        cluster = Cluster(MemoryApi(self.store))
        mirror = Mirror(scopes, lambda _: None, lambda *_: None, lambda *_: None, lambda _: None)
        jobs = Jobs(lambda: 0.0, Instruments())
        self._snapshots = SnapshotReader(cluster, mirror, jobs, read_nodes=False, site=DEFAULTS_KINDS)

    async def at(self, raw: dict[str, Any], uid: str = "uid") -> Snapshot:
        return await self._snapshots.mirrored(Key("ns", "job", uid), copy.deepcopy(raw), NOW)


async def test_the_same_spec_is_not_read_again() -> None:
    looks = Looks()
    first, again = await looks.at(_raw()), await looks.at(_raw())
    assert again.job.spec is first.job.spec
    assert again.topology is first.topology


async def test_what_changes_is_read_again() -> None:
    looks = Looks()
    await looks.at(_raw())
    wider = await looks.at(_raw(trainer={"groups": [{"name": "a", "replicas": 3, "gpus": 2}]}))
    assert wider.topology.world_size == 6
    assert (await looks.at(_raw())).topology.world_size == 3
    later = _raw() | {"metadata": {"generation": 2, "resourceVersion": "2"}}
    assert (await looks.at(later)).job.generation == 2
    halved = later | {"status": dump(GRPOJobStatus(micro_batch_halvings=1))}
    assert (await looks.at(halved)).job.micro_batch_halvings == 1


async def test_a_spec_at_fault_follows_the_status() -> None:
    looks = Looks()
    wrong = _raw(training={"maxSteps": "many"})
    groups = [{"name": "a", "role": "trainer", "desired": 2, "ready": 0, "incarnation": 0}]
    assert len((await looks.at(wrong)).topology.pods) == 1  # of a group that stands in
    assert len((await looks.at(wrong | {"status": {"groups": groups}})).topology.pods) == 2


async def test_of_many_jobs_the_ones_looked_at_last_are_remembered() -> None:
    looks = Looks()
    first = await looks.at(_raw())
    for number in range(REMEMBERED - 1):
        await looks.at(_raw(), uid=f"other-{number}")
    assert (await looks.at(_raw())).topology is first.topology
    for number in range(REMEMBERED):
        await looks.at(_raw(), uid=f"another-{number}")
    assert (await looks.at(_raw())).topology is not first.topology


async def test_only_jobs_that_need_a_kind_wait_until_the_api_server_lists_it() -> None:
    gangs, queues = (
        Scope(kind, None, obstacle=ObstacleError(Reason.PASS_FAILED, f"the API server does not list {kind}s: 500"))
        for kind in ("PodGroup", "Workload")
    )
    looks = Looks(gangs, queues)
    plain, gang = _raw(), _raw(scheduling={"gang": "Native"})
    queued = plain | {"metadata": plain["metadata"] | {"labels": {LABEL_QUEUE: "team"}}}
    seen = await looks.at(plain)
    assert not seen.observed.has_queues, "its attempt does not end for want of a Workload"
    for raw, kind in ((gang, "PodGroup"), (queued, "Workload")):
        with pytest.raises(ObstacleError, match=f"does not list {kind}s: 500") as error:
            await looks.at(raw)
        assert error.value.__notes__ == [f"reading the job's {kind}"]
    ended = set_condition(GRPOJobStatus(), Condition.COMPLETE, True, "Done", "all steps", generation=1, now=NOW)
    await looks.at(gang | {"status": dump(ended)})

    gangs.version, gangs.obstacle = 7, None
    await looks.at(gang)
    queues.version, queues.obstacle = 7, None
    assert (await looks.at(queued)).observed.has_queues


def _site(**block: Any) -> dict[str, Any]:
    metadata = {"name": DEFAULTS_NAME, "namespace": "ns"}
    return {"apiVersion": API_VERSION, "kind": "GRPODefaults", "metadata": metadata, "spec": block}


async def test_what_the_site_sets_reaches_jobs_that_have_not_begun() -> None:
    looks = Looks()
    looks.store.put(_site(defaults={"image": "mirror/grpo:1", "queue": "team"}))
    new = await looks.at(_raw())
    assert (new.job.spec.image, new.job.queue and new.job.queue.name) == ("mirror/grpo:1", "team")
    begun = _raw() | {"status": dump(GRPOJobStatus(attempt=0, site=dict(new.job.site)))}

    looks = Looks()
    looks.store.put(_site(enforced={"image": "mirror/grpo:2"}))
    assert (await looks.at(begun)).job.spec.image == "mirror/grpo:1"
    mine = (await looks.at(_raw(image="mine"))).job
    assert (mine.spec.image, mine.queue) == ("mirror/grpo:2", None)
    assert mine.refused == f"spec.image: GRPODefaults {DEFAULTS_NAME} enforces mirror/grpo:2; set this, or leave it out"
