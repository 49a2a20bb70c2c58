"""verifiers in a program: an exchange of several turns, or a tool of its own over MCP.

AGENT_PACKAGES is the folder in which verifiers and openenv are, each in one of its own: they want older packages than
the image has.
"""

import os
import sys

OWN = os.path.join(os.environ["AGENT_PACKAGES"], "verifiers")
sys.path.insert(0, OWN)
os.environ["PYTHONPATH"] = os.pathsep.join([OWN, os.environ["PYTHONPATH"]])  # of the servers that verifiers starts

import verifiers.v1 as vf  # noqa: E402


class Question(vf.TaskData):
    """A question with the text that is looked for in the answer."""

    answer: str


class Asked(vf.Task[Question]):
    """A task that is solved if the last answer has the text."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if it has."""
        return float(self.data.answer in trace.last_reply)


class CalculatorConfig(vf.ToolsetConfig):
    """No settings."""


class Calculator(vf.Toolset[CalculatorConfig]):
    """A server with one tool."""

    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


class Calculated(Asked):
    """A task with the tool."""

    @classmethod
    def toolsets(cls, config):
        """The servers that the agent reaches."""
        return [Calculator(CalculatorConfig())]


async def play(row, *, base_url, api_key, model):
    """Say what the row says, one after the other; with one question alone, offer the tool."""
    config = {
        "harness": {"id": "null"},
        "runtime": {"type": "subprocess"},
        "model": model,
        "client": {"type": "eval", "base_url": base_url, "api_key_var": "OPENAI_API_KEY"},
    }
    agent = vf.make_agent(vf.AgentConfig.model_validate(config))
    if len(row["says"]) == 1:
        trace = await agent.run(Calculated(Question(prompt=row["says"][0], answer=row["answer"])))
    else:
        async with agent.interaction(Asked(Question(prompt=None, answer=row["answer"]))) as interaction:
            for say in row["says"]:
                await interaction.turn(say)
        trace = interaction.trace
    if not trace.ok:
        raise RuntimeError(f"the rollout failed: {trace.errors}")
    return trace.reward


if __name__ == "__main__":
    Calculator.run()
