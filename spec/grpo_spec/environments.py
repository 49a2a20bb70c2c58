"""The sections `tools`, `environments` and `episodes`: what a model acts in, and within which limits. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from grpo_spec.schema import FunctionPath, Name, Rule, Section, Size, one_of

CALL_SECONDS = 30
_ENV = tuple[Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_]\w*$")], ...]
_ENV_TEXT = (
    "Names of the pod's variables that are passed to it, for example an API key. Besides them it gets only those that "
    "programs need to run, and no credentials. Set it where it needs one."
)
_MEMORY_TEXT = "Memory limit of each process that runs it, for example 512Mi. A call that needs more fails."
_SECONDS_TEXT = (
    "Limit of one call. Raise it where calls take long. An episode whose call takes longer begins again, as its "
    "process is ended (episodes.retries)."
)


class ToolConfig(Section):
    """One function that the model may call."""

    function: FunctionPath = Field(
        description="module:function, sync or async. Its name, type hints and docstring (Google style) become the "
        "tool's description, as in TRL. What it returns becomes text that the model reads."
    )
    env: _ENV = Field((), max_length=64, description=_ENV_TEXT)
    memory_limit: Size = Field("8Gi", description=_MEMORY_TEXT)
    timeout_seconds: int = Field(CALL_SECONDS, ge=1, le=86_400, description=_SECONDS_TEXT)

    @property
    def name(self) -> str:
        """The tool's name, which the model writes."""
        return self.function.rpartition(":")[2]


class EnvironmentConfig(Section):
    """One kind of environment: an object with a state, whose methods the model calls, or a program that asks it."""

    RULES = (
        one_of("factory", "program"),
        Rule(
            "!has(self.params) || has(self.factory)",
            "params needs factory: a program reads the row",
            lambda e: not e.params or e.factory is not None,
        ),
    )

    name: Name = Field(description="Its name; the dataset's column `environment` chooses one where there are several.")
    factory: FunctionPath | None = Field(
        None,
        description="module:Class or module:function that returns an object, as TRL's environment_factory: its public "
        "methods are tools, reset(**row) begins an episode and may return text that is put behind the last "
        "message, get_reward() may score it. Set it where the model's calls are the loop.",
    )
    program: FunctionPath | None = Field(
        None,
        description="module:function, sync or async, that plays an episode with any client of OpenAI's chat "
        "completions: play(row, *, base_url, api_key, model). The number that it returns is its get_reward(). Set it "
        "where an agent has a loop of its own.",
    )
    params: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Keyword arguments of `factory`. Set it for environments with settings.",
    )
    env: _ENV = Field((), max_length=64, description=_ENV_TEXT)
    memory_limit: Size = Field("8Gi", description=_MEMORY_TEXT)
    timeout_seconds: int = Field(
        CALL_SECONDS,
        ge=1,
        le=86_400,
        description=f"{_SECONDS_TEXT} Of a program: between two answers of the model.",
    )

    @property
    def code(self) -> str:
        """The function that makes its objects, or is its program."""
        found = self.factory or self.program
        assert found is not None, "RULES"
        return found


class EpisodesConfig(Section):
    """Limits of episodes: completions with tools, or in an environment."""

    timeout_seconds: int = Field(
        600,
        ge=1,
        le=86_400,
        description="Seconds that an episode may spend in calls, or in its program, all together; then it ends, and is "
        "scored as it is. "
        "Raise it for environments in which episodes take long.",
    )
    max_tool_response_tokens: int = Field(
        1024,
        ge=1,
        le=1_048_576,
        description="Most tokens of one call's result; what is longer is cut, and says so. Raise it where results are "
        "long, and lower it where they leave the model no room.",
    )
    retries: int = Field(
        2,
        ge=0,
        le=100,
        description="How often an episode begins again, with the same seeds, when its environment fails: its process "
        "ended, reset or its program raised, a call took too long or lost its connection. After that it counts "
        "nowhere. Raise it where environments are often away.",
    )
    max_failed_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Largest share of a step's episodes that may be lost so; more end the attempt as "
        "EnvironmentFailed. Raise it where few episodes are enough, and lower it where each one counts.",
    )


_EPISODES = "(has(self.tools) && size(self.tools) > 0 || has(self.environments) && size(self.environments) > 0)"
"""`TrainerConfig.has_episodes` as CEL."""

EPISODE_RULES = (
    Rule(
        f"!{_EPISODES} || self.generation.engine == 'vLLM'",
        "tools and environments need generation.engine vLLM",
        lambda c: not c.has_episodes or c.generation.engine == "vLLM",
    ),
    Rule(
        f"!{_EPISODES} || !self.training.routerReplay",
        "training.routerReplay works for completions of one turn: leave it out, or tools and environments",
        lambda c: not c.has_episodes or not c.training.router_replay,
    ),
    Rule(
        f"!{_EPISODES} || self.training.presencePenalty == 0.0 && self.training.frequencyPenalty == 0.0",
        "training.presencePenalty and frequencyPenalty work for completions of one turn, as vLLM counts the tokens of "
        "the last turn alone; with tools or environments, repetitionPenalty would work",
        lambda c: not c.has_episodes or (c.training.presence_penalty, c.training.frequency_penalty) == (0, 0),
    ),
    Rule(
        "!has(self.tools) || self.tools.all(t, self.tools.exists_one(u, "
        "u.__function__.endsWith(t.__function__.substring(t.__function__.indexOf(':')))))",
        "two functions of tools have the same name, by which the model calls them: rename one of them",
        lambda c: len({t.name for t in c.tools}) == len(c.tools),
    ),
    Rule(
        "!(self.rewards.exists(r, has(r.environment)) || has(self.evaluation) && has(self.evaluation.rewards) && "
        "self.evaluation.rewards.exists(r, has(r.environment))) || "
        "has(self.environments) && size(self.environments) > 0",
        "rewards[].environment needs environments, whose get_reward it calls",
        lambda c: bool(c.environments) or all(r.environment is None for r in (*c.rewards, *c.evaluation_rewards)),
    ),
    Rule(
        "!has(self.training.maxToolCallingIterations) || has(self.tools) && size(self.tools) > 0 || "
        "has(self.environments) && self.environments.exists(e, has(e.factory))",
        "training.maxToolCallingIterations needs tools or environments with a factory: a program counts for itself",
        lambda c: c.training.max_tool_calling_iterations is None or bool(c.tools or c.factories),
    ),
    Rule(
        "!has(self.tools) || size(self.tools) == 0 || !has(self.environments) || "
        "!self.environments.exists(e, has(e.program))",
        "tools do not go with environments[].program: a program calls its own tools",
        lambda c: not c.tools or len(c.factories) == len(c.environments),
    ),
    Rule(
        f"!has(self.generation.toolCallParser) || {_EPISODES}",
        "generation.toolCallParser needs tools or environments",
        lambda c: c.generation.tool_call_parser is None or c.has_episodes,
    ),
)
"""Rules of `TrainerConfig`: what goes with tools and environments."""
