"""Episodes in real processes: one that dies costs its episode a second try, and every other nothing."""

import asyncio
import os
import signal
from contextlib import closing

import psutil
import pytest

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.environments.base import ToolCall
from grpo_workload.generation.episode_draft import Turn
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.limits import Limits
from grpo_workload.training.lost_episodes import Losses, too_many
from support.trainer.agents import COUNTER, make_config, start
from support.trainer.environment_pods import EnvironmentPod, connect

END, GENERATIONS = 256, 4
PROMPT = Prompt(index=7, text=[], token_ids=(10, 11), seed=5, columns={"level": 1})
TURNS = (b"append 4", b"roll", b"pid", b"append 5", b"done")


class Words:
    """`episodes.Words` of bytes: a turn names a tool, and its argument if it has one; `done` calls nothing."""

    def calls(self, token_ids):
        text = bytes(token_ids[:-1]).decode()
        name, _, number = text.partition(" ")
        arguments = {"number": int(number)} if number else {}
        return text, "", [] if name == "done" else [ToolCall(name=name, arguments=arguments)]

    def results(self, last, answers):
        messages = [{"role": "tool", "name": name, "content": text} for name, text in answers]
        return [token for _, text in answers for token in text.encode()], messages

    def observed(self, prompt, text):
        return (*prompt.token_ids, *text.encode())


@pytest.fixture(scope="module")
def sessions():
    with closing(start(environments=[COUNTER], wants_reward=True)) as found:
        found.ready()
        yield found


def play(sessions, act=lambda number, num_turns, text: None, prompt=PROMPT, retries=2):
    """Play the episodes of a prompt; `act` gets an episode's number, its turns so far and the last result."""
    limits = Limits(max_tokens=1000, max_prompt_tokens=None, max_iterations=None, seconds=60.0, retries=retries)

    async def sample(ask):
        num_turns = ask.token_ids.count(END)
        if num_turns:
            end = len(ask.token_ids) - ask.token_ids[::-1].index(END)
            act(ask.number, num_turns, bytes(ask.token_ids[end:]).decode())
        turn = [*TURNS[num_turns], END]
        return Turn(token_ids=turn, logprobs=[-0.5] * len(turn), versions=[0], finish_reason="stop")

    episodes = Episodes(limits, sessions, Words())
    return asyncio.run(episodes.play_group(prompt, GENERATIONS, sample, lambda: None, lambda: 0))


def seen(completion):
    """Return what may not depend on the process: all results but its number."""
    results = [one["content"] for one in completion.episode.messages if one["role"] == "tool"]
    return completion.episode.prompt_ids, (*results[:2], *results[3:]), completion.episode.reward


def test_a_process_that_is_killed_costs_a_second_try(sessions):
    undisturbed = play(sessions)
    assert [one.episode.retries for one in undisturbed] == [0] * GENERATIONS
    assert len({seen(one) for one in undisturbed}) == 1, "they begin in the same state, and draw the same numbers"
    killed = []

    def kill(number, num_turns, text):
        if (number, num_turns, killed) == (1, 3, []):  # its third call has returned the number of its process
            killed.append(int(text))
            os.kill(killed[0], signal.SIGKILL)

    completions = play(sessions, kill)
    assert len(killed) == 1
    assert [one.episode.retries for one in completions] == [0, 1, 0, 0]
    assert [seen(one) for one in completions] == [seen(one) for one in undisturbed]
    assert {one.episode.reward for one in completions} == {3 + 4 + 5}
    assert not any(one.is_lost for one in completions)


def test_a_pod_that_is_killed_costs_its_episodes_a_second_try_on_the_other(sessions, tmp_path):
    undisturbed = play(sessions)
    config = make_config(environments=[COUNTER])
    pods = [EnvironmentPod(tmp_path / name, config) for name in ("a", "b")]
    on_pods = connect(config, *(pod.address for pod in pods), wants_reward=True)

    killed = []

    def kill(number, num_turns, text):
        if (number, num_turns, killed) == (1, 3, []):  # its third call has returned the number of its process
            above = {process.pid for process in psutil.Process(int(text)).parents()}
            killed.extend(pod for pod in pods if pod.process.pid in above)
            killed[0].kill()

    try:
        on_pods.ready()
        for pod in pods:
            pod.wait_until_ready()
        completions = play(on_pods, kill)
    finally:
        on_pods.close()
        for pod in pods:
            pod.kill()
    assert len(killed) == 1
    assert completions[1].episode.retries == 1
    assert sum(one.episode.retries for one in completions) in (1, 2), "of the two that it has, one may have ended"
    assert [seen(one) for one in completions] == [seen(one) for one in undisturbed]


def test_a_reset_that_always_raises_loses_all_and_says_why(sessions):
    completions = [
        one
        for how in ("raises", "away")
        for one in play(sessions, prompt=Prompt(index=7, text=[], token_ids=(10,), seed=5, columns={"how": how}))
    ]
    assert all(one.is_lost for one in completions)
    assert {one.episode.retries for one in completions} == {2}
    complaint = too_many([Losses.of(completions)], 0.5)
    assert "failed in 8 of 8 episodes, also when they began again (4 reset, 4 connection)" in complaint
    assert "the last failure: environments[counter].factory" in complaint
    assert "the game's server is away" in complaint
