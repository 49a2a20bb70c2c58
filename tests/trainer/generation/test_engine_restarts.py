"""Real vLLM servers that die and come back: completions and weights are the same as without the loss of an engine.

One of the two servers has two workers. They die in a push, while generating, and all at once while generating. A third
server is elastic: it joins later, and leaves. The tests share the engines, since each restart takes long: a test starts
with the engines and the version that the one before has left.
"""

import logging

import pytest
import torch

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.generation.gloo_group import GlooGroup
from grpo_workload.generation.servers import weight_sender
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.vllm_api import sampling_parameters
from support.trainer.engines import PROMPTS, Engines, change, make_contract, own_generator, own_logprobs, weights_of
from support.trainer.launchers import eventually

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pods(tiny_model, tmp_path_factory):
    contract = make_contract(tiny_model, [(2, 1), (1, 1), (1, 1)], restarts=True, elastic=[2])
    started = Engines(tmp_path_factory.mktemp("engines"), contract)
    with started.running():
        yield started


@pytest.fixture(scope="module")
def generator(pods, model, tmp_path_factory):
    timing = Timing(poll=0.5, lost=5, late=0, away=0.5)
    folder = tmp_path_factory.mktemp("group")
    with own_generator(pods.contract, lambda: weights_of(model), folder, timing) as ready:
        yield ready


def prompts():
    return [Prompt(index=index, text="", token_ids=(*PROMPTS[index % 3], index), seed=index) for index in range(12)]


def is_of(model, prompt, completion):
    return torch.allclose(own_logprobs(model, prompt, completion), torch.tensor(completion.logprobs), atol=1e-4, rtol=0)


def check_every_engine(generator, model, version):
    """Assert that each engine samples with the model's weights and reports their version."""
    link = generator._link
    for client in link.clients:
        if client.engine.name not in generator._pusher.roster.current:
            assert client.engine.elastic
            continue
        for prompt in prompts()[:3]:
            sampling = sampling_parameters(generator._sampler._training) | {"seed": prompt.seed}
            process = generator._pusher.roster.current[client.engine.name]
            work = client.complete(prompt.token_ids, model=process, num_samples=2, sampling=sampling, version=version)
            assert all(is_of(model, prompt, completion) for completion in link.run(work)), client.engine.name
        assert link.run(client.weight_version()) == str(version)


def check_complete(groups, model, version):
    """Assert that every prompt has two completions, sampled with the model's weights."""
    assert [len(group) for group in groups] == [2] * len(prompts())
    for prompt, group in zip(prompts(), groups, strict=True):
        assert all(is_of(model, prompt, completion) for completion in group)
        assert {completion.weight_version for completion in group} == {version}


def on_call(monkeypatch, kind, method, number, act, of=None):
    """Call `act` before call `number`, counted from 1, of `kind`'s method; `of` counts only one engine's calls."""
    original, calls = getattr(kind, method), []

    def wrapped(self, *args, **kwargs):
        if of is None or self.engine == of:
            calls.append(self)
            if len(calls) == number:
                act()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, method, wrapped)


def test_after_a_loss_in_a_push_all_engines_get_all_weights(generator, pods, model, monkeypatch, caplog):
    one, two, _ = pods.contract.engines
    first = dict(generator._pusher.roster.current)
    change(model)
    # Pieces so small that they cut layers: the other engine has received parts of some when the push fails.
    monkeypatch.setitem(weight_sender.PIECE_BYTES, "gloo", 2**12)

    def lose():
        pods.kill(two)
        pods.replace(two)

    on_call(monkeypatch, GlooGroup, "broadcast", 5, lose)
    generator.expect_weights()
    generator.sync_weights(weights_of(model), 1)

    assert "pushing all weights again" in caplog.text
    assert generator._pusher.roster.current[one.name] == first[one.name]
    assert generator._pusher.roster.current[two.name] != first[two.name]
    check_every_engine(generator, model, 1)


def test_an_engine_lost_while_generating_gets_weights_at_the_next_push(generator, pods, model, monkeypatch, caplog):
    _, two, _ = pods.contract.engines
    on_call(monkeypatch, EngineClient, "complete", 3, lambda: pods.kill(two), of=two)
    groups = generator.generate(prompts(), 2)
    check_complete(groups, model, generator._version)
    assert "to another engine: engine engine-1 (pod engine-1" in caplog.text

    generator.expect_weights()
    pods.replace(two)
    change(model)
    generator.sync_weights(weights_of(model), 2)
    check_every_engine(generator, model, 2)


def test_generation_continues_after_all_engines_were_lost(generator, pods, model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    version = generator._version
    before = generator.generate(prompts(), 2)

    *needed, third = pods.contract.engines

    def lose():
        for engine in needed:
            pods.kill(engine)
        for engine in needed:
            pods.replace(engine)
        pods.start(third)  # for the next test

    on_call(monkeypatch, EngineClient, "complete", 8, lose)
    groups = generator.generate(prompts(), 2)

    check_complete(groups, model, version)
    assert [[one.token_ids for one in group] for group in groups] == [
        [one.token_ids for one in group] for group in before
    ]
    check_every_engine(generator, model, version)


def test_an_elastic_engine_joins_with_a_push_and_leaves_without_one(generator, pods, model, monkeypatch, caplog):
    *needed, third = pods.contract.engines
    # Perhaps it was there when all weights were pushed to the engines that came back.
    eventually(lambda: third.name in generator._link.observe().processes, "the elastic engine is there")
    change(model)
    generator.sync_weights(weights_of(model), 3)
    assert third.name in generator._pusher.roster.current
    check_every_engine(generator, model, 3)

    on_call(monkeypatch, EngineClient, "complete", 2, lambda: pods.kill(third), of=third)
    groups = generator.generate(prompts(), 2)
    check_complete(groups, model, 3)
    assert "to another engine: engine engine-2 (pod engine-2" in caplog.text

    change(model)
    generator.sync_weights(weights_of(model), 4)  # waits for nobody
    assert generator._pusher.roster.current.keys() == {engine.name for engine in needed}
    check_every_engine(generator, model, 4)
