"""The section `rewards`: what completions are scored by. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from grpo_spec.schema import FunctionPath, Name, OneGroup, Pattern, Rule, Section, Size, Text, one_of

REWARD_SECONDS = 300


class Empty(Section):
    """A choice that has no settings."""


class FormatConfig(Section):
    """The form that a completion must have."""

    RULES = (one_of("tags", "pattern"),)

    tags: (
        Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]{0,63}$")], ...], Field(min_length=1)] | None
    ) = Field(
        None,
        max_length=16,
        description="Names of tags, for example [think, answer]: each once, closed, in this order, and nothing but "
        "white space around them. Set it where prompts ask for tags.",
    )
    pattern: Pattern | None = Field(
        None,
        description="Regular expression of Python that the whole completion must match. A dot also matches line ends; "
        "white space at both ends is removed before. Set it for a form that is not tags alone.",
    )


class SoftOverlongConfig(Section):
    """DAPO's soft punishment of overlong completions (arXiv:2503.14476, equation 13)."""

    RULES = (
        Rule(
            "self.cacheLength <= self.maxLength",
            "cacheLength must not be more than maxLength",
            lambda s: s.cache_length <= s.max_length,
            lambda s: s.max_length,
            "self.maxLength",
        ),
    )

    max_length: int = Field(
        ge=1, le=1_048_576, description="Tokens at which the reward is -1; mostly training.maxCompletionLength."
    )
    cache_length: int = Field(
        ge=1, le=1_048_576, description="Number of tokens before maxLength over which the reward falls from 0 to -1."
    )


class ExactMatchConfig(Section):
    """Comparison with a column of the dataset, as text."""

    column: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        "answer",
        description="Column with the answer, or with a list of answers of which any is right. Set it where the column "
        "has another name.",
    )
    extract: OneGroup | None = Field(
        None,
        description="Regular expression of Python with one group, which is the answer in the completion; the last "
        "match counts. Default: the whole completion. Set it where completions say more than the answer, for "
        "example <answer>(.*?)</answer>.",
    )


class JsonSchemaConfig(Section):
    """JSON that a JSON Schema accepts."""

    RULES = (one_of("inline", "column"),)

    inline: dict[Annotated[str, Field(max_length=256)], JsonValue] | None = Field(
        None, max_length=256, description="The schema. Set it where all prompts have the same."
    )
    column: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Column of the dataset with each prompt's schema, as JSON in a text. Set it where prompts have "
        "different ones.",
    )
    extract: OneGroup | None = Field(
        None,
        description="Regular expression of Python with one group, which is the JSON in the completion; the last match "
        "counts. Default: the whole completion. Set it where completions say more than the JSON, for example "
        "<answer>(.*?)</answer>.",
    )


class JudgeConfig(Section):
    """A language model that scores completions, behind an OpenAI-compatible API."""

    RULES = (
        Rule(
            "self.promptTemplate.contains('{completion}')",
            "promptTemplate must contain {completion}",
            lambda j: "{completion}" in j.prompt_template,
        ),
    )

    url: Annotated[str, Field(max_length=1024, pattern=r"^https?://\S+$")] = Field(
        description="Address of the API without /chat/completions, for example http://judge:8000/v1."
    )
    model: Text = Field(description="Name of the model there.")
    prompt_template: Annotated[str, Field(min_length=1, max_length=16384)] = Field(
        description="What the judge is asked, with {prompt}, {completion} and columns of the dataset as {column}. "
        "Other braces are doubled."
    )
    score_pattern: OneGroup = Field(
        r"(-?\d+(?:\.\d+)?)",
        description="Regular expression of Python with one group, which is the score in the judge's answer; the last "
        "match counts. By default the last number. Set it where other numbers may come after the score, as in 8/10.",
    )
    api_key_env: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_]\w*$")] | None = Field(
        None,
        description="Name of the pod's variable that has the API key; set it in podTemplate.env from a secret. Set it "
        "where the API asks for a key.",
    )
    params: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        {"temperature": 0},
        max_length=64,
        description="Further fields of each request, for example max_tokens. Some models refuse temperature: set {}.",
    )
    concurrency: int = Field(
        16,
        ge=1,
        le=1024,
        description="Number of requests of each rank at the same time. Lower it where the API answers 429; raise it "
        "for a judge of your own that has room for more.",
    )
    request_seconds: int = Field(
        60, ge=1, le=86_400, description="Limit of one request. Raise it for judges that think for long."
    )
    max_retries: int = Field(
        5,
        ge=0,
        le=100,
        description="How often a request is repeated after 408, 429, 5xx, a lost connection or requestSeconds; then "
        "the rank fails. Raise it where the judge may restart meanwhile.",
    )


class RewardConfig(Section):
    """One reward function; a completion's reward is the weighted sum of those that did not return None for it."""

    RULES = (
        one_of(
            "accuracy",
            "environment",
            "exact_match",
            "format",
            "json_schema",
            "judge",
            "reasoning_gym",
            "soft_overlong",
            "stopped",
            "function",
            "factory",
        ),
        Rule(
            "!has(self.env) || has(self.__function__) || has(self.factory)",
            "env needs function or factory: built-in rewards read no variables",
            lambda r: not r.env or r.code is not None,
        ),
        Rule(
            "!has(self.params) || has(self.__function__) || has(self.factory)",
            "params needs function or factory",
            lambda r: not r.params or r.code is not None,
        ),
        Rule(
            "self.memoryLimit == '8Gi' || has(self.accuracy) || has(self.__function__) || has(self.factory)",
            "memoryLimit needs function, factory or accuracy: other rewards have no process of their own",
            lambda r: r.memory_limit == "8Gi" or r.accuracy is not None or r.code is not None,
        ),
    )

    name: Name = Field(description="Name of the reward in metrics, as rewards/<name>/mean.")
    weight: float = Field(1.0, ge=-1000, le=1000, description="Weight in the sum.")
    accuracy: Empty | None = Field(
        None,
        description="math-verify: 1 when the answer equals the column `solution` or `answer`, else 0. A list holds "
        "answers of which any is right.",
    )
    environment: Empty | None = Field(
        None,
        description="What the environment's get_reward() returns at the end of the episode; None where it has no such "
        "method. Set it where the environment itself scores.",
    )
    exact_match: ExactMatchConfig | None = Field(
        None,
        description="1 when the answer is the column's text, else 0. Case, runs of white space and a full stop at the "
        "end do not count. For answers that are no math.",
    )
    format: FormatConfig | None = Field(None, description="1 when the completion has the format, else 0.")
    json_schema: JsonSchemaConfig | None = Field(
        None, description="1 when the completion is JSON that the schema accepts, else 0. For tools and forms."
    )
    judge: JudgeConfig | None = Field(
        None, description="The score that a language model gives. For answers that no rule can judge."
    )
    reasoning_gym: Empty | None = Field(None, description="The score, 0 to 1, that the reasoning-gym dataset gives.")
    soft_overlong: SoftOverlongConfig | None = Field(
        None, description="0 for a completion that is short enough, down to -1 at maxLength: DAPO's soft punishment."
    )
    stopped: Empty | None = Field(
        None, description="1 when the completion ended by itself, 0 when it was cut at maxCompletionLength."
    )
    function: FunctionPath | None = Field(
        None,
        description="module:function with TRL's signature f(prompts, completions, completion_ids, **columns), sync or "
        "async. Each rank runs it in a separate process.",
    )
    factory: FunctionPath | None = Field(
        None,
        description="module:function or module:Class that is called once in each process, with `params`, and returns "
        "the function. Set it for rewards with settings or a state, for example "
        "trl.rewards:get_soft_overlong_punishment.",
    )
    params: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Keyword arguments of `factory`, or of each call of `function` besides the columns.",
    )
    env: tuple[Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_]\w*$")], ...] = Field(
        (),
        max_length=64,
        description="Names of the pod's variables that are passed to `function` or `factory`, for example an API key. "
        "Besides them it gets only those that programs need to run (PATH, HOME, PYTHON*, CUDA_*, HF_HOME, RANK, ...), "
        "and no credentials.",
    )
    memory_limit: Size = Field(
        "8Gi",
        description="Memory limit of the process that runs `function`, `factory` or `accuracy`, for example 512Mi. A "
        "call that needs more fails.",
    )
    timeout_seconds: int = Field(
        REWARD_SECONDS,
        ge=1,
        le=86_400,
        description="Limit of one call, which scores one rank's completions of a step. A longer one fails the rank, "
        "with a message that names the reward. With `accuracy` it is the limit of one answer, at most 15: one that "
        "takes longer scores 0 and is counted.",
    )

    @property
    def code(self) -> str | None:
        """module:function of the user's code, if the reward is not built in."""
        return self.function or self.factory
