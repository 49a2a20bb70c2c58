"""Elastic engines that answer but never join the group of pushes: ranks wait a moment, name them, and go on without.

The engines have no model, but join and receive as vLLM's workers do; how they hang is the test's.
"""

import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from grpo_workload.generation.servers import joining
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.errors import EngineDiffersError, EngineError, RefusedError
from grpo_workload.generation.servers.generator import ServerGenerator
from grpo_workload.generation.servers.pusher import may_be_left_out
from grpo_workload.weights.export import Export, Weight
from support.trainer.engines import make_contract, own_world
from support.trainer.launchers import eventually

JOIN, AGAIN = 1.5, 2.0
LIMIT = 60  # rendezvous.timeoutSeconds, which nothing here may take
TIMING = Timing(poll=0.2, lost=5, late=0, away=0.2, join=JOIN, again=AGAIN)


class Started:
    """Engines as processes, and the generator that pushes to them."""

    def __init__(self, folder, contract, start_program):
        self.folder, self.contract, self._start_program = folder, contract, start_program
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.version = 0  # of the current weights

    def engine(self, position, how="joins", *, is_stuck=False):
        engine = self.contract.engines[position]
        name = f"{engine.name}.1"
        if is_stuck:
            self.stuck(engine).touch()
        self.running[name] = self._start_program("light_engine.py", engine.port, name, self.folder, how)
        return engine

    def stuck(self, engine, how="stuck"):
        return self.folder / f"{engine.name}.1.{how}"

    def received(self, version):
        """Return the sum of the weights of a version, by the process that received them."""
        found = self.folder.glob(f"*-{version}")
        return {path.name.removesuffix(f"-{version}"): float(path.read_text()) for path in found}


@pytest.fixture
def engines(tmp_path, start_program):
    contract = make_contract(Path("/nowhere"), [(1, 1)] * 4, restarts=True, timeout=LIMIT, elastic=[1, 2, 3])
    with own_world(tmp_path):
        yield Started(tmp_path, contract, start_program)


@pytest.fixture
def generator(engines):
    """A generator that has pushed to the needed engine, and to elastic engine-1, as version 1."""
    engines.engine(0)
    newcomer = engines.engine(1)
    ready = ServerGenerator(engines.contract, 0, lambda: ones(engines.version), TIMING)
    await_engine(ready, newcomer)
    push(engines, ready, 1)
    assert engines.received(1) == {"engine-0.1": 4.0, "engine-1.1": 4.0}
    yield ready
    ready.close()


def ones(value):
    weight = Weight("weight", (torch.full((4,), value),), torch.Tensor.clone)
    return Export([weight], is_partitioned=False)


def await_engine(generator, engine):
    eventually(lambda: engine.name in generator._link.observe().processes, f"the ranks see {engine.name}")


def push(engines, generator, version):
    """Push a version; return how long that took, in seconds."""
    engines.version, start = version, time.monotonic()
    generator.sync_weights(ones(version), version)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "is_stuck", "why"),
    [
        (
            "joins",
            True,
            "answers, but its workers have not reached rank 0 at 127.0.0.1:{port} within 1.5 s, to join the transfer "
            "group: does a network policy or a firewall keep the pod from this port, or does its engine hang?",
        ),
        ("only-comes", False, "cannot join a transfer group: "),
    ],
)
def test_a_newcomer_that_cannot_join_is_named_and_left_out_while_others_get_weights(
    engines, generator, how, is_stuck, why, caplog
):
    bad = engines.engine(2, how, is_stuck=is_stuck)
    await_engine(generator, bad)
    sender = generator._pusher.sender
    group = sender._formed

    assert push(engines, generator, 2) < JOIN + 5
    assert engines.received(2) == {"engine-0.1": 8.0, "engine-1.1": 8.0}
    assert sender._formed is group, "the others have stayed in their group"
    (reason,) = generator.left_out()
    port = engines.contract.transfers[0].port
    assert reason.startswith(f"engine engine-2 (pod engine-2, 127.0.0.1:{bad.port}) {why.format(port=port)}")
    assert "it is left out, and tried again in 2 s" in caplog.text

    assert push(engines, generator, 3) < JOIN, "nobody waits for it while it is left out"
    assert engines.received(3).keys() == {"engine-0.1", "engine-1.1"}


def test_a_push_waits_for_one_of_several_newcomers_and_each_may_come_back(engines, generator):
    bad = [engines.engine(position, is_stuck=True) for position in (2, 3)]
    for engine in bad:
        await_engine(generator, engine)
    assert push(engines, generator, 2) < 2 * JOIN
    assert len(generator.left_out()) == 1
    assert push(engines, generator, 3) < 2 * JOIN
    assert len(generator.left_out()) == 2
    assert engines.received(3).keys() == {"engine-0.1", "engine-1.1"}

    for engine in bad:
        engines.stuck(engine).unlink()
    versions = iter(range(4, 1000))

    def have_all():
        version = next(versions)
        push(engines, generator, version)
        return len(engines.received(version)) == 4

    eventually(have_all, "both are tried again, and join")
    assert generator.left_out() == []


def test_a_member_that_does_not_come_to_a_new_group_is_left_out_too(engines, generator):
    engines.stuck(engines.contract.engines[1]).touch()
    await_engine(generator, engines.engine(2))
    assert push(engines, generator, 2) < JOIN + 5
    assert engines.received(2) == {"engine-0.1": 8.0, "engine-2.1": 8.0}
    (reason,) = generator.left_out()
    assert reason.startswith("engine engine-1 (pod engine-1")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("deaf", "holds up a push of weights: it has received 0 of 1 pieces, and got no further for 1.5 s"),
        ("silent", "did not answer /pause within 1.5 s"),
    ],
)
def test_a_member_that_hangs_in_a_push_is_named_and_the_others_get_all_weights(engines, generator, how, why):
    bad = engines.contract.engines[1]
    engines.stuck(bad, how).touch()
    assert push(engines, generator, 2) < 2 * JOIN + 5
    assert engines.received(2) == {"engine-0.1": 8.0}
    (reason,) = generator.left_out()
    assert reason.startswith(f"engine engine-1 (pod engine-1, 127.0.0.1:{bad.port}) {why}")


def test_a_member_that_no_longer_names_its_process_holds_up_one_push_and_joins_again_when_it_does(engines, generator):
    bad = engines.contract.engines[1]
    engines.stuck(bad, "nameless").touch()
    assert push(engines, generator, 2) < JOIN + 5
    assert engines.received(2) == {"engine-0.1": 8.0}
    (reason,) = generator.left_out()
    assert reason == (
        f"engine engine-1 (pod engine-1, 127.0.0.1:{bad.port}) is healthy, but cannot be used: it did not answer "
        "/v1/models within 1.5 s; until that changes, it gets no weights and no prompts"
    )
    assert push(engines, generator, 3) < JOIN, "no other push waits for it"
    engines.stuck(bad, "nameless").unlink()
    await_engine(generator, bad)
    assert generator.left_out() == []
    push(engines, generator, 4)
    assert engines.received(4).keys() == {"engine-0.1", "engine-1.1"}


def test_a_newcomer_that_does_not_name_its_process_holds_up_no_push_and_is_named(engines, generator):
    bad = engines.contract.engines[2]
    engines.stuck(bad, "nameless").touch()
    engines.engine(2)
    eventually(generator.left_out, "the watch has found the engine, and waited for its answer")
    assert push(engines, generator, 2) < JOIN
    (reason,) = generator.left_out()
    assert reason.startswith("engine engine-2 (pod engine-2")
    engines.running.pop("engine-2.1").kill()
    eventually(lambda: generator.left_out() == [], "an engine that is gone is not left out")


def test_an_engine_that_ranks_wait_for_is_named_when_it_does_not_join_in_time(engines):
    needed = engines.engine(0, is_stuck=True)
    with closing(socket.socket()) as connection:
        eventually(lambda: connection.connect_ex((needed.host, needed.port)) == 0, "the engine listens")
    short = engines.contract.model_copy(update={"timeout_seconds": 2})
    with pytest.raises(EngineError, match=r"engine engine-0 .* answers, but its workers have not reached rank 0"):
        ServerGenerator(short, 0, lambda: ones(1), TIMING)


def test_a_port_that_is_taken_is_named_and_no_engine_is_blamed(engines):
    (group,) = engines.contract.transfers
    message = rf"rank 0 cannot listen on 127.0.0.1:{group.port} \(transferPort"
    with closing(socket.create_server(("", group.port))), pytest.raises(RuntimeError, match=message):
        ServerGenerator(engines.contract, 0, lambda: ones(1), TIMING)


def test_only_so_many_threads_hang_in_nccl(engines, monkeypatch, caplog):
    """NCCL, which needs GPUs, is replaced by a call that waits, as NCCL's does if its own connections fail."""
    ended = threading.Event()

    def hang(*_):
        ended.wait()
        raise RuntimeError("the network is back, and the others are gone")

    monkeypatch.setattr(joining, "NcclChannel", hang)
    monkeypatch.setattr(joining, "MOST_HANGING", 2)
    elastic = engines.engine(1, "only-comes")
    link = EngineLink([elastic], deadline=LIMIT, restarts=True, timing=TIMING)
    (client,) = link.clients
    with closing(socket.socket()) as connection:
        eventually(lambda: connection.connect_ex((elastic.host, elastic.port)) == 0, "the engine listens")
    starts = joining.Joining(engines.contract.transfers[0], link, "nccl", lambda: None)
    for number in (1, 2):
        with pytest.raises(EngineError, match="cannot join a transfer group: its workers have reached rank 0"):
            starts.try_alone(client)
        assert f"a thread hangs in NCCL, in a group with engine-1; {number} do now" in caplog.text
    with pytest.raises(EngineError, match=r"engine engine-1 .* is not tried: 2 threads of rank 0 hang in NCCL"):
        starts.try_alone(client)
    ended.set()
    eventually(lambda: not starts._in_nccl, "the threads end")
    link.close()


def test_an_engine_that_refuses_what_all_would_refuse_is_not_left_out(engines):
    needed, elastic, *_ = engines.contract.engines
    assert may_be_left_out(EngineError(elastic, "hangs"))
    assert not may_be_left_out(EngineError(needed, "hangs"))
    assert not may_be_left_out(EngineDiffersError(elastic, "refused its weights"))
    assert not may_be_left_out(RefusedError(elastic, "answered with 400"))
