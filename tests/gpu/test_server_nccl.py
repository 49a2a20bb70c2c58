"""Weights pushed over NCCL to vLLM servers arrive, on other GPUs in time; peers lost in a broadcast are replaced."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from grpo_workload.generation.servers.channels import NcclChannel
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.weights.wire import describe
from support.trainer.engines import change, weights_of
from support.trainer.launchers import eventually
from support.trainer.nccl_engines import BF16_ERROR, difference, serving
from support.trainer.random_llama import make_random_llama

pytestmark = pytest.mark.vllm

SYNC_SECONDS = 0.3  # for a push of 1.5 billion parameters
IS_SHARED = torch.cuda.device_count() < 2  # by this process and the first engine
ENGINES_GPU = 0 if IS_SHARED else 1
NAMED_SECONDS = 30  # until a lost peer is noticed
LEFT = "the trainer has left the transfer group in the middle of an update"


@pytest.fixture
def model(tmp_path_factory):
    """A random Llama of 1.5 billion parameters in bfloat16 on the first GPU; its name is its folder."""
    return make_random_llama(tmp_path_factory.mktemp("llama"), "cuda:0", hidden=2048, layers=24, heads=16)


def test_a_push_arrives_in_time(model, tmp_path):
    with serving(model, tmp_path, 1) as (generator, _):
        assert difference(model, generator) < BF16_ERROR
        change(model)
        stale = difference(model, generator)

        seconds = []
        for version in range(1, 6):
            start = time.perf_counter()
            generator.sync_weights(weights_of(model), version)
            seconds.append(time.perf_counter() - start)

        fresh = difference(model, generator)
        print(f"pushes took {seconds} s; mean difference {stale:.3f} before, {fresh:.4f} after")
        assert fresh < BF16_ERROR
        assert stale > 10 * fresh
        assert IS_SHARED or min(seconds) < SYNC_SECONDS


def stop_when_sent_to(pods, engine, monkeypatch):
    """Stop the processes of `engine` when the next broadcast starts, and then set the returned event."""
    broadcast, started = NcclChannel.broadcast, threading.Event()

    def send_to_a_stopped_engine(channel, bytes_N):
        if not started.is_set():
            os.killpg(pods.server(engine), signal.SIGSTOP)
            started.set()
        broadcast(channel, bytes_N)

    monkeypatch.setattr(NcclChannel, "broadcast", send_to_a_stopped_engine)
    return started


def test_an_engine_that_dies_during_a_broadcast_is_named_and_the_device_becomes_free(model, tmp_path, monkeypatch):
    with serving(model, tmp_path, 1) as (generator, pods):
        generator.sync_weights(weights_of(model), 1)
        (engine,) = pods.contract.engines
        started = stop_when_sent_to(pods, engine, monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            push = pool.submit(generator.sync_weights, weights_of(model), 2)
            assert started.wait(30)
            eventually(lambda: torch.cuda.utilization(0) > 0, "the broadcast spins on the device")
            start = time.perf_counter()
            pods.kill(engine)
            with pytest.raises(EngineError, match=f"engine {engine.name}"):
                push.result(60)
            named = time.perf_counter() - start
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        freed = time.perf_counter() - start
        print(f"named after {named:.1f} s; the device was free after {freed:.1f} s")
        assert freed < NAMED_SECONDS


def test_an_engine_leaves_a_broadcast_whose_sender_is_gone_and_joins_the_next_transfer_group(model, tmp_path):
    with serving(model, tmp_path, 1) as (generator, _):
        generator.sync_weights(weights_of(model), 1)
        sender, link, (client,) = generator._pusher.sender, generator._link, generator._link.clients
        link.run(client.pause())
        link.run(client.start_update())
        info = describe(weights_of(model).specs) | {"piece_bytes": 2**28, "is_initial": False}
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(link.run, client.update(info))
            try:
                eventually(lambda: torch.cuda.utilization(ENGINES_GPU) > 0, "the engine waits in the broadcast")
            finally:  # else the update would wait for ever, and the pool for it
                start = time.perf_counter()
                sender._leave()
            with pytest.raises(EngineError, match=LEFT):
                update.result(NAMED_SECONDS)
            print(f"the engine left the broadcast after {time.perf_counter() - start:.1f} s")
        change(model)
        sender.join([client], limit=NAMED_SECONDS)
        generator.sync_weights(weights_of(model), 2)
        assert difference(model, generator) < BF16_ERROR


def test_a_restarted_engine_returns_to_the_transfer_group(model, tmp_path):
    with serving(model, tmp_path, 2, restarts=True) as (generator, pods):
        generator.sync_weights(weights_of(model), 1)
        _, two = pods.contract.engines
        before = dict(generator._pusher.roster.current)
        start = time.perf_counter()
        pods.kill(two)
        pods.replace(two)
        change(model)
        generator.sync_weights(weights_of(model), 2)
        print(f"the transfer group was complete again {time.perf_counter() - start:.1f} s after the kill")
        assert generator._pusher.roster.current[two.name] != before[two.name]
        for _ in range(2):  # engines take turns, so both answer
            assert difference(model, generator) < BF16_ERROR


def test_a_healthy_engine_survives_a_broadcast_during_which_another_dies(model, tmp_path, monkeypatch):
    with serving(model, tmp_path, 2, restarts=True) as (generator, pods):
        generator.sync_weights(weights_of(model), 1)
        one, two = pods.contract.engines
        before = dict(generator._pusher.roster.current)
        started = stop_when_sent_to(pods, two, monkeypatch)
        change(model)
        with ThreadPoolExecutor(1) as pool:
            push = pool.submit(generator.sync_weights, weights_of(model), 2)
            assert started.wait(30)
            eventually(lambda: torch.cuda.utilization(ENGINES_GPU) > 0, "the healthy engine waits in the broadcast")
            start = time.perf_counter()
            pods.kill(two)
            try:
                log = pods.log(one)
                eventually(lambda: LEFT in log.read_text(), "the healthy engine's worker notices", NAMED_SECONDS)
                noticed = time.perf_counter() - start
            finally:  # else the push would wait for this engine, and the pool for the push
                pods.replace(two)
            push.result(200)
        print(
            f"the healthy engine left the broadcast after {noticed:.1f} s; "
            f"all weights had arrived after {time.perf_counter() - start:.1f} s"
        )
        assert generator._pusher.roster.current[one.name] == before[one.name], (
            "the healthy engine should not have restarted"
        )
        assert generator._pusher.roster.current[two.name] != before[two.name]
        for _ in range(2):
            assert difference(model, generator) < BF16_ERROR
