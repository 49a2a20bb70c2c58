"""Pushes to and completions from one real vLLM engine whose layers are divided over two pods; one of them is lost."""

import os
import signal
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from urllib.request import urlopen

import pytest

from grpo_spec.contract import Follower
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.generation.servers.errors import EngineDiffersError
from grpo_workload.weights.export import Export, full
from support.trainer.engines import Engines, change, largest_difference, make_contract, weights_of
from support.trainer.launchers import eventually, free_ports

pytestmark = pytest.mark.vllm


def over_two_pods(contract):
    """Return a contract whose engine has its second half in a pod of its own."""
    port, meeting_port = free_ports(2)
    (engine,) = contract.engines
    update = {
        "followers": (Follower(pod="engine-1", port=port),),
        "meeting_port": meeting_port,
        "pipeline_parallel": 2,
    }
    return contract.model_copy(update={"engines": (engine.model_copy(update=update),)})


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    pods = Engines(tmp_path_factory.mktemp("engines"), over_two_pods(make_contract(tiny_model, [(1, 1)])))
    with pods.running():
        yield pods


def test_a_later_attempt_in_the_same_pods_starts_both_parts_again(engines):
    def servers():
        pids = [one.pid for one in engines.launchers.values()]
        return [Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0] for pid in pids]

    def is_healthy(port):
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    (engine,) = engines.contract.engines
    ports = (engine.port, engine.followers[0].port)
    eventually(lambda: all(map(is_healthy, ports)), "both pods are ready")
    before, fresh = servers(), engines.folder / "contract.tmp"
    fresh.write_text(engines.contract.model_copy(update={"attempt": 1}).model_dump_json(by_alias=True))
    fresh.replace(engines.folder / "contract.json")
    eventually(lambda: not any(map(is_healthy, ports)), "both parts have ended")
    eventually(lambda: all(map(is_healthy, ports)), "both pods are ready again")
    assert not {*before} & {*servers()}


# The first push to the engine: only the first push is compared with what the engine has loaded.
def test_the_second_pod_refuses_first_weights_that_are_not_what_it_loaded(generator, model):
    changed = [one._replace(make=lambda value: 2 * value) if "layers.1." in one.name else one for one in full(model)]
    with pytest.raises(EngineDiffersError, match=r"and then had others in .*layers\.1\."):
        generator.sync_weights(Export(changed, is_partitioned=False), 0)
    generator._pusher.with_engines(generator._pusher.join)
    generator.sync_weights(weights_of(model), 0)
    assert largest_difference(model, generator) < 1e-4


def test_both_pods_hold_what_was_pushed(generator, model):
    before = deepcopy(model)
    change(model, seed=1)
    generator.sync_weights(weights_of(model), version=3)
    assert largest_difference(model, generator) < 1e-4 < largest_difference(before, generator)


# The last test of this file: the engine has ended after it.
def test_of_two_pods_that_end_the_one_that_was_killed_says_so_and_the_other_that_it_lost_it(engines):
    (engine,) = engines.contract.engines
    launcher = engines.launchers["engine-1"]
    engines._may_end |= {launcher, engines.launchers[engine.name]}
    (server,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)

    def outcome(pod):
        said = (engines.folder / f"{pod}.termination-log").read_text()
        return Outcome.model_validate_json(said) if said else None

    killed = eventually(lambda: outcome("engine-1"), "the pod says how its part has ended")
    other = eventually(lambda: outcome("engine-0"), "the first pod says how the engine has ended")
    assert (killed.exit_code, killed.reason) == (ExitCode.RANK_FAILED, Reason.ENGINE_DIED)
    assert "pod engine-1: engine engine-0 was killed by SIGKILL" in killed.message
    assert (other.exit_code, other.reason) == (ExitCode.PEER_LOST, Reason.PEER_LOST)
    assert "pod engine-1 of the same engine has ended" in other.message
