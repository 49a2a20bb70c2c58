"""Pushes to and completions from two real vLLM servers in one transfer group, with this process as the trainer's rank.

One server has two data-parallel copies, the other has one copy over two workers.
"""

import json
import operator
import os
import re
import signal
import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.samples import Prompt, Sample
from grpo_workload.generation import vllm_api
from grpo_workload.generation.servers import weight_sender
from grpo_workload.generation.servers.errors import EngineDiffersError, EngineError
from grpo_workload.generation.servers.generator import ServerGenerator
from grpo_workload.generation.servers.token_watch import replicas
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.ranks.seeds import sample_seed
from grpo_workload.weights.export import Export, full
from support.paths import PROGRAMS
from support.trainer.corrupt import CHANGES, changing
from support.trainer.engines import (
    PROMPTS,
    Engines,
    change,
    largest_difference,
    make_contract,
    own_logprobs,
    prompts,
    weights_of,
    with_ranks,
)
from support.trainer.launchers import DEADLINE, eventually
from support.trainer.listeners import Heard
from support.trainer.scripted_episodes import ENDS, scripted_episodes, turns_of

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    contract = make_contract(tiny_model, [(1, 2), (2, 1)], maxModelLen=512)
    pods = Engines(tmp_path_factory.mktemp("engines"), contract)
    with pods.running():
        yield pods


def assert_refused(generator, model, weights, version, message):
    """Assert that engines refuse `weights`, and take the model's afterwards."""
    before = generator._version
    with pytest.raises(EngineDiffersError, match=message):
        generator.sync_weights(Export(weights, is_partitioned=False), version)
    generator._pusher.with_engines(generator._pusher.join)  # abandons the update
    generator.sync_weights(weights_of(model), before)
    assert largest_difference(model, generator) < 1e-4


# The first test of this file: only the first push is compared with what the engines have loaded.
def test_the_first_push_may_not_change_the_base_model(generator, model):
    doubled = [one._replace(make=lambda value: 2 * value) for one in full(model)]
    assert_refused(generator, model, doubled, 0, r"and then had others in .* \(by 100%\)")


def test_engines_hold_what_was_pushed(generator, model, monkeypatch):
    assert largest_difference(model, generator) < 1e-4
    change(model, seed=1)
    stale = largest_difference(model, generator)
    monkeypatch.setitem(weight_sender.PIECE_BYTES, "gloo", 2**12)  # one or two matrices: vLLM's fused layers are cut

    generator.expect_weights()
    link = generator._link
    eventually(
        lambda: all(link.run(client._call("GET", "/is_paused"))["is_paused"] for client in link.clients),
        "the engines pause",
    )
    start = time.perf_counter()
    generator.sync_weights(weights_of(model), version=3)
    seconds = time.perf_counter() - start

    # There are more prompts than engines, so both engines answer.
    fresh = largest_difference(model, generator)
    print(f"pushed in {seconds:.2f} s; largest difference {stale:.2e} before, {fresh:.2e} after")  # noqa: T201
    assert fresh < 1e-4
    assert stale > 100 * fresh


def test_each_turn_of_an_episode_is_what_an_engine_samples_for_its_tokens(generator, model, monkeypatch):
    monkeypatch.setattr(generator._sampler, "_episodes", scripted_episodes(40, 64))
    usual = vllm_api.sampling_parameters
    monkeypatch.setattr(vllm_api, "sampling_parameters", lambda training: usual(training) | ENDS)
    groups = generator.generate(prompts(), 4, heard := Heard())
    assert heard.groups == dict(enumerate(groups))
    client = generator._link.clients[0]
    num_turns = 0
    for prompt, group in zip(prompts(), groups, strict=True):
        for number, completion in enumerate(group):
            own = own_logprobs(model, replace(prompt, token_ids=completion.prompt_ids(prompt)), completion)
            for start, stop in turns_of(completion):
                num_turns += 1
                sampled = torch.tensor(completion.logprobs[start:stop])
                assert (own[start:stop] - sampled).abs().max() < 1e-4
                again = client.complete(
                    [*completion.prompt_ids(prompt), *completion.token_ids[:start]],
                    model=generator._pusher.roster.current[client.engine.name],
                    num_samples=1,
                    sampling=generator._sampler._parameters(sample_seed(prompt.seed, number, start), 0, None)
                    | {"max_tokens": 40 - start},
                    version=0,
                )
                (found,) = generator._link.run(again)
                assert found.token_ids == completion.token_ids[start:stop]
    assert num_turns > len(groups) * 4, "episodes have several turns"


def test_completions_are_reproducible_and_end_as_they_say(generator, tiny_tokenizer):
    groups = generator.generate(prompts(), 3, heard := Heard())
    again = generator.generate(prompts(), 3)

    assert heard.groups == dict(enumerate(groups))
    assert heard.moves >= len(groups), "every answer shows that an engine gets on"
    assert [len(group) for group in groups] == [3, 3, 3]
    assert [[one.token_ids for one in group] for group in groups] == [
        [one.token_ids for one in group] for group in again
    ]
    completions = [one for group in groups for one in group]
    assert len({one.token_ids for one in completions}) > 1
    assert {one.weight_version for one in completions} == {generator._version}
    for one in completions:
        assert one.finish_reason == ("stop" if one.token_ids[-1] == tiny_tokenizer.eos_token_id else "length")
        assert len(one.token_ids) == 8 or one.finish_reason == "stop"


def test_many_long_prompts_come_at_once(generator):
    """More tokens than an engine prefills in one step, with seeds: on CPUs it may not do so in parts."""
    many = [Prompt(index=n, text="", token_ids=(1, 10 + n, *range(10, 90)) * 6, seed=n) for n in range(24)]
    groups = generator.generate(many, 2)
    assert [len(group) for group in groups] == [2] * 24


def test_the_metrics_of_each_copy_change_with_what_it_samples(generator):
    before = metrics_of(generator)
    assert [sorted(copies) for copies in before] == [["0", "1"], ["0"]]
    generator.generate([replace(prompt, seed=seed) for seed in range(4) for prompt in prompts()], 2)
    # The server shows them a moment after its answer.
    eventually(
        lambda: all(
            old[copy] != samples
            for old, new in zip(before, metrics_of(generator), strict=True)
            for copy, samples in new.items()
        ),
        "all copies have sampled",
    )


def metrics_of(generator):
    """Return vLLM's samples of each copy, by engine."""
    link = generator._link
    return [replicas(link.run(client.metrics())) for client in link.clients]


def test_an_engine_with_other_weights_is_not_used(generator, caplog):
    first = generator._link.clients[0]
    version = generator._version
    generator._link.run(first._call("POST", "/update_weight_version", json={"new_version": "2"}))
    try:
        groups = generator.generate(prompts(), 2)
        assert len(groups) == len(PROMPTS)
        assert "engine engine-0 (pod engine-0" in caplog.text
        assert f"is not used: it has weights of version 2, not {version}" in caplog.text
    finally:
        generator._link.run(first._call("POST", "/update_weight_version", json={"new_version": str(version)}))


def test_sampling_goes_on_through_a_push(engines, generator, model):
    contract = with_ranks(engines.contract, 1)
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    sampling = {"max_staleness": 1, "max_completion_length": 480} | penalties
    training = contract.config.training.model_copy(update=sampling)
    config = contract.config.model_copy(update={"training": training})
    ahead = ServerGenerator(contract.model_copy(update={"config": config}), 0, lambda: weights_of(model))
    many = 24  # so many that an engine is still at them when the push comes, also one that began first
    later = [replace(prompt, seed=9) for prompt in prompts()]
    old = deepcopy(model)
    try:
        ahead.sync_weights(weights_of(model), 4)
        before = tokens_sampled(ahead)
        ahead.begin(prompts(), many, heard := Heard())
        eventually(lambda: any(map(operator.gt, tokens_sampled(ahead), before)), "an engine samples")
        # Before the model changes, which takes a moment: its new weights wait for nothing but this pause.
        ahead.expect_weights()
        change(model, seed=2)
        ahead.sync_weights(weights_of(model), 5)
        ahead.begin(later, 2)
        ((tried,),) = ahead.evaluate([replace(prompts()[0], seed=10)], 1, 0.5)  # while all others are in flight
        groups, fresh = ahead.generate(prompts(), many), ahead.generate(later, 2)
    finally:
        ahead.close()
        generator._pusher.with_engines(generator._pusher.join)  # the other one's group took its place
        generator.sync_weights(weights_of(model), 6)

    assert (tried.weight_version, tried.weight_updates) == (5, 0)
    assert heard.groups == dict(enumerate(groups)), "the listener that was there when they began hears of them"
    cut = [
        difference(old, prompt, one, training)
        for prompt, group in zip(prompts(), groups, strict=True)
        for one in group
        if (one.weight_version, one.weight_updates) == (4, 1)
    ]
    # One whose request arrived during the push has no token of the old weights; it is called as old as the others.
    begun = [differences for differences in cut if differences[0] < 1e-4]
    assert begun
    assert any(differences[-5:].max() > 1e-3 for differences in begun), "and goes on with the new weights"
    assert {(one.weight_version, one.weight_updates) for group in groups for one in group} <= {(4, 0), (4, 1)}
    # The same prompts: nothing that the old weights have cached is used.
    for prompt, group in zip(later, fresh, strict=True):
        for one in group:
            assert (one.weight_version, one.weight_updates) == (5, 0)
            assert difference(model, prompt, one, training).max() < 1e-4


def difference(model, prompt, completion, training):
    """Return |log-probability of the trainer - of the engine| of each token, under penalties."""
    batch = micro_batch([Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0)])
    with torch.no_grad():
        own = LogprobHead(model).per_token(model, batch, 1.0, penalties=Penalties.of(training)).logprobs_BT[0]
    return (own - torch.tensor(completion.logprobs)).abs()


def tokens_sampled(generator):
    """Return how many tokens each engine has sampled so far. This never falls, so no moment is missed."""
    link = generator._link
    texts = [link.run(client.metrics()) for client in link.clients]
    return [sum(map(float, re.findall(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)", text, re.M))) for text in texts]


def test_each_engine_gives_log_probabilities_of_given_tokens(generator, model):
    ids = list(range(3, 60))
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    own = scores.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    found = generator.logprobs(ids)
    assert found.keys() == {"engine engine-0", "engine engine-1"}
    for theirs in found.values():
        torch.testing.assert_close(torch.tensor(theirs), own, atol=1e-4, rtol=0)


def test_a_push_that_lacks_layers_is_refused_and_names_them(generator, model):
    weights = [one for one in full(model) if ".layers.1." not in one.name]
    assert_refused(generator, model, weights, 4, r"too few, for model\.layers\.1\.")


@pytest.mark.parametrize("how", CHANGES)
def test_a_weight_that_changes_on_its_way_is_refused_by_engine_and_name(generator, model, how, monkeypatch):
    name = "model.layers.1.mlp.up_proj.weight"
    with monkeypatch.context() as patch:
        patch.setattr(weight_sender, "with_sums", changing(name, how))
        said = rf"^engine engine-\d .*weights altered: {name} changed between"
        with pytest.raises(EngineError, match=said) as raised:
            generator.sync_weights(weights_of(model), 8)
    assert not isinstance(raised.value, EngineDiffersError), "another attempt may go well"
    generator._pusher.with_engines(generator._pusher.join)  # abandons the update
    generator.sync_weights(weights_of(model), 9)
    assert largest_difference(model, generator) < 1e-4


# The last test of this file: it kills an engine.
def test_engines_go_on_into_a_later_attempt_and_a_killed_one_is_named_on_every_rank(
    generator, engines, start_ranks, tmp_path
):
    generator.close()  # its watch would end the pytest process
    servers = {engine.name: engines.server(engine) for engine in engines.contract.engines}
    later = engines.contract.model_copy(update={"attempt": 1})
    (fresh := engines.folder / "fresh.json").write_text(later.model_dump_json(by_alias=True))
    fresh.replace(engines.folder / "contract.json")
    for engine in engines.contract.engines:
        eventually(lambda engine=engine: "attempt 1: engines go on" in engines.log(engine).read_text(), engine.name)
        assert engines.server(engine) == servers[engine.name]
    (tmp_path / "contract.json").write_text(with_ranks(later, 2).model_dump_json(by_alias=True))
    ranks = start_ranks([str(PROGRAMS / "server_ranks.py"), str(tmp_path)], 2, "ranks")
    results = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    ranks.until(lambda: all(result.exists() for result in results))
    for result in results:
        assert json.loads(result.read_text()) == {"versions": [7, 7], "is_close": True, "is_stopped": True}

    killed = engines.contract.engines[1]
    launcher = engines.expect_end(killed)
    os.kill(engines.server(killed), signal.SIGKILL)
    start = time.monotonic()

    assert all(code != 0 for code in ranks.exit_codes())
    assert time.monotonic() - start < 120, "the ranks must not wait 400 s for their collectives"
    for rank in range(2):
        assert f"engine engine-1 (pod engine-1, 127.0.0.1:{killed.port})" in ranks.error(rank)
    assert launcher.wait(DEADLINE) == ExitCode.RANK_FAILED
    outcome = Outcome.model_validate_json(engines.termination_log(killed).read_text())
    assert (outcome.reason, outcome.pod_uid) == ("EngineDied", "uid-of-engine-1")
    assert "engine engine-1 was killed by SIGKILL" in outcome.message
    assert json.loads((engines.folder / killed.pod / "attempt-1" / "result.json").read_text())["reason"] == "EngineDied"
