"""Episodes on engines that die, which are fake: what is lost is sampled again, and nothing else is."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.generation.base import SILENCE
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.gateway.programs import Programs
from grpo_workload.generation.gateway.server import GatewayServer
from grpo_workload.generation.limits import Limits
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.sampling import Sampler
from support.trainer.engines import make_contract
from support.trainer.scripted_episodes import RESULT, ScriptedSession, Words

PROMPT = Prompt(index=3, text="", token_ids=(17,), seed=5)


class Talk:
    """A `base.Program` that talks in two turns, in this process."""

    timeout_seconds = 60.0

    async def begin(self): ...

    async def run(self, endpoint):
        messages: list[Any] = [{"role": "user", "content": "17"}]
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        return 0.5

    async def late(self):
        raise AssertionError

    async def close(self): ...


class Chatting:
    """`base.Sessions` of that program, and the `conversation.Words` that it needs."""

    def open(self, columns, seed):
        return Talk()

    def begin(self, messages, tools):
        return [int(messages[0]["content"])]

    def reply(self, last, messages, called):
        return RESULT

    def read(self, token_ids, tools):
        return "said", "said", []


class Tool(ScriptedSession):
    """Sessions of one tool, which count what is done in them."""

    def __init__(self):
        super().__init__()
        self.events: list[str] = []

    def open(self, columns, seed):
        return self

    async def reset(self):
        self.events.append("reset")
        return ""

    async def call(self, calls, seconds):
        self.events.append("call")
        return await super().call(calls, seconds)

    async def end(self):
        self.events.append("end")
        return await super().end()


def asked(path):
    """Return the tokens and the seed of each request to an engine."""
    return [(one["prompt"], one["seed"]) for one in map(json.loads, path.read_text().splitlines())]


LIMITS = Limits(max_tokens=50, max_prompt_tokens=None, max_iterations=None, seconds=60.0, retries=0)


def play(contract, episodes):
    """Play an episode on engines that have been started."""
    timing = Timing(poll=0.1, lost=0.5)
    with closing(EngineLink(contract.engines, deadline=60, restarts=True, timing=timing)) as link:
        link.wait_ready()
        sampler = Sampler(link, contract, 0, episodes)
        link.run_freely(sampler.begin([PROMPT], 1, link.observe().processes, 0, SILENCE))
        assert link.run_freely(sampler.wait([PROMPT])) is None
        ((completion,),) = sampler.take([PROMPT])
    return completion


@pytest.mark.parametrize("is_program", [False, True], ids=["tool", "program"])
def test_an_engine_that_dies_costs_the_turn_alone(is_program, start_program, tmp_path, caplog):
    contract, tool, chatting = make_contract(Path("/nowhere"), [(1, 1), (1, 1)], restarts=True), Tool(), Chatting()
    server = GatewayServer(contract.config.training, "model")
    programs = Programs(chatting, server, max_tokens=50, max_prompt_tokens=None, seconds=60.0)
    episodes = Episodes(LIMITS, chatting, None, programs) if is_program else Episodes(LIMITS, tool, Words())
    for engine, how in zip(contract.engines, ("dies", "answers"), strict=True):
        start_program("fake_engine.py", engine.port, engine.name, tmp_path / how, how)
    completion = play(contract, episodes)

    first, second = asked(tmp_path / "dies")
    assert asked(tmp_path / "answers") == [second], "the other engine is asked the same, once"
    assert first[0] == [*PROMPT.token_ids]
    turns = [*first[0], first[1]], [*second[0], second[1]]  # what a fake engine answers
    assert second[0] == [*PROMPT.token_ids, *turns[0], *RESULT]
    assert [*completion.token_ids] == [*turns[0], *RESULT, *turns[1]]
    assert first[1] != second[1]
    assert tool.events == ([] if is_program else ["reset", "call", "end"])
    assert (completion.episode.num_turns, completion.episode.retries) == (2, 0)
    assert "sending prompt 3 to another engine: engine engine-0" in caplog.text
