"""OpenEnv in a program: its client of an environment over a WebSocket, and its client of a model.

Run as a program, it is the environment's server: with_openenv.py PORT. AGENT_PACKAGES is as in `with_verifiers`.
"""

import os
import re
import sys

sys.path.insert(0, os.path.join(os.environ["AGENT_PACKAGES"], "openenv"))

from openenv import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.llm_client import OpenAIClient


class Guess(Action):
    """A guess."""

    number: int


class Seen(Observation):
    """The answer to a guess."""

    text: str = ""


class Numbers(Environment):
    """Guess a number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, number=50, **more):
        self.number, self._state = number, State(episode_id=episode_id)
        return Seen(text="I think of a number from 1 to 100.")

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        is_right = action.number == self.number
        text = "right" if is_right else "larger" if action.number < self.number else "smaller"
        return Seen(text=text, done=is_right, reward=1.0 / self._state.step_count if is_right else 0.0)

    @property
    def state(self):
        return self._state


async def play(row, *, base_url, api_key, model):
    """Let the model guess three times; returns the sum of the steps' rewards."""
    asks = OpenAIClient(base_url, None, model, api_key=api_key, temperature=row["temperature"], max_tokens=12)
    async with GenericEnvClient(base_url=f"http://127.0.0.1:{row['port']}") as environment:
        result = await environment.reset(number=row["number"])
        messages, total = [{"role": "user", "content": result.observation["text"]}], 0.0
        for _ in range(3):
            said = await asks.complete_with_tools(messages, [])
            found = re.search(r"[0-9]+", said.content)
            result = await environment.step({"number": int(found[0]) if found else 0})
            total += result.reward or 0.0
            if result.done:
                break
            messages += [said.to_message_dict(), {"role": "user", "content": result.observation["text"]}]
    return total


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(Numbers, Guess, Seen, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
