"""Programs of `user_programs` in their processes, before a real gateway; the engine says what a test tells it to."""

import asyncio
import os

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.environments.chat_words import ChatWords
from grpo_workload.environments.processes import Processes
from grpo_workload.environments.sessions import RankSessions
from grpo_workload.generation.episode_draft import Turn
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.gateway.programs import Programs
from grpo_workload.generation.gateway.server import GatewayServer
from grpo_workload.generation.limits import Limits
from support.trainer import places
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.tool_template import TOOL_TEMPLATE

MODEL, USER = "org/model", "support.trainer.user_programs"


def config_of(program=f"{USER}:any_of_them", training=None, **more):
    """Return a job with a program."""
    environments = [{"name": "agent", "program": program, "memoryLimit": "2Gi"} | more]
    rewards = [{"name": "own", "environment": {}}]
    return places.config_of(model={"name": MODEL}, rewards=rewards, training=training or {}, environments=environments)


def start(config):
    """Start the program's zygote, and wait until it is ready."""
    sessions = RankSessions(Processes(config.tools, config.environments, os.environ), config, wants_reward=True)
    sessions.ready()
    return sessions


class Engine:
    """Says texts, one a turn, cut where there is no room; keeps what it was asked."""

    def __init__(self, *says, seconds=0.0, error=None):
        self.tokenizer = make_tiny_tokenizer(template=TOOL_TEMPLATE)
        self.says, self.seconds, self.error, self.asked = says, seconds, error, []

    async def __call__(self, ask):
        if self.error is not None:
            raise self.error
        self.asked.append(ask)
        said = self.says[min(len(self.asked), len(self.says)) - 1]
        await asyncio.sleep(self.seconds)
        whole = self.tokenizer(f"{said}<|im_end|>")["input_ids"]
        tokens = whole[: ask.max_tokens]
        is_whole = len(tokens) == len(whole)
        finish_reason = "stop" if is_whole else "length"
        logprobs = [-0.5] * len(tokens)
        return Turn(token_ids=tokens, logprobs=logprobs, versions=[4], finish_reason=finish_reason)


def play(sessions, config, engine, program, *, max_tokens=2000, seconds=60.0, retries=0, episode=0, **row):
    """Play one episode of a program with a row; returns the completion, and how often it said that it goes on."""
    limits = Limits(max_tokens=max_tokens, max_prompt_tokens=400, max_iterations=None, seconds=seconds, retries=retries)
    programs = Programs(
        ChatWords(config, engine.tokenizer),
        GatewayServer(config.training, MODEL),
        max_tokens=limits.max_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
        seconds=limits.seconds,
    )
    columns = row | {"plays": program}
    prompt = Prompt(index=3, text=[{"role": "user", "content": "A row."}], token_ids=(1, 2), columns=columns, seed=5)
    beats = []
    episodes = Episodes(limits, sessions, None, programs)
    completion = asyncio.run(episodes.play(prompt, episode, engine, lambda: beats.append(1), lambda: 9))
    return completion, beats
