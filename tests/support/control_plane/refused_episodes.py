"""Specs with tools and environments that CEL, in the API server, and pydantic refuse: each with the message."""

from typing import Any

_TOOLS = {"tools": [{"function": "m:f"}]}
_ACTS = {"environments": [{"name": "wordle", "factory": "m:Wordle"}]}
_PLAYS = {"environments": [{"name": "agent", "program": "m:play"}]}
_BY_ENVIRONMENT = [{"name": "r", "environment": {}}]
_GYM = {"dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}}, "everySteps": 5}

_TWO = {"environments": [{"name": "wordle", "factory": "m:Wordle"}, {"name": "sql", "factory": "m:Sql"}]}


def _pods(*groups: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with these groups of environment pods, called e0, e1 and so on if they do not say."""
    named = [{"name": f"e{number}"} | group for number, group in enumerate(groups)]
    return {"environmentPods": {"groups": named}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (section | change, complaint)
        for section in (_TOOLS, _ACTS, _PLAYS)
        for change, complaint in (
            ({"generation": {"engine": "Transformers"}}, "tools and environments need generation.engine vLLM"),
            ({"training": {"routerReplay": True}}, "training.routerReplay works for completions of one turn"),
            ({"training": {"presencePenalty": 0.5}}, "presencePenalty and frequencyPenalty work for completions of"),
            ({"training": {"frequencyPenalty": 0.5}}, "presencePenalty and frequencyPenalty work for completions of"),
        )
    ),
    ({"rewards": _BY_ENVIRONMENT}, "rewards[].environment needs environments"),
    (_TOOLS | {"rewards": _BY_ENVIRONMENT}, "rewards[].environment needs environments"),
    ({"evaluation": _GYM | {"rewards": _BY_ENVIRONMENT}}, "rewards[].environment needs environments"),
    ({"training": {"maxToolCallingIterations": 4}}, "maxToolCallingIterations needs tools or environments"),
    (_PLAYS | {"training": {"maxToolCallingIterations": 4}}, "needs tools or environments with a factory"),
    ({"generation": {"toolCallParser": "hermes"}}, "generation.toolCallParser needs tools or environments"),
    (_PLAYS | _TOOLS, "tools do not go with environments[].program"),
    (
        {"environments": [{"name": "both", "factory": "m:Wordle", "program": "m:play"}]},
        "exactly one of factory, program",
    ),
    ({"environments": [{"name": "none"}]}, "exactly one of factory, program"),
    ({"environments": [{"name": "agent", "program": "m:play", "params": {"a": 1}}]}, "params needs factory"),
    (
        {"tools": [{"function": "a:search"}, {"function": "b.c:search"}, {"function": "b:research"}]},
        "two functions of tools have the same name",
    ),
    (_pods({}), "environmentPods needs tools or environments"),
    (_PLAYS | _pods({}), "environmentPods do not go with environments[].program"),
    (_ACTS | _pods({"podTemplate": {"hostNetwork": True}}), "must not set hostNetwork or privileged"),
    (_ACTS | _pods({"podTemplate": {"privileged": True}}), "must not set hostNetwork or privileged"),
    (_ACTS | _pods({"environments": ["chess"]}, {}), "environments must be names of environments"),
    (_TOOLS | _pods({"environments": ["wordle"]}), "environments must be names of environments"),
    (_TWO | _pods({"environments": ["sql"]}, {"environments": ["sql"]}), "must be served by a group"),
    *(
        (
            section | pods | {"training": {"maxStaleness": 2, "promptsPerStep": 4, "numGenerations": 8}},
            "must exceed that number; 65 would work",
        )
        for section, pods in (
            (_TOOLS, _pods({"replicas": 2, "sessions": 32})),
            (_ACTS, _pods({"sessions": 32}, {"sessions": 32})),
            (_TWO, _pods({"sessions": 64}, {"environments": ["sql"]})),
        )
    ),
    (_TOOLS | _pods({"name": "a"}), "groups of environmentPods must have other names than those of trainer"),
    (
        _TOOLS
        | _pods({"name": "g"})
        | {"generation": {"topology": "Server", "server": {"groups": [{"name": "g", "gpus": 1}]}}},
        "groups of environmentPods must have other names than those of trainer and generation.server",
    ),
]

ACCEPTED: list[dict[str, Any]] = [
    _TOOLS | {"training": {"maxToolCallingIterations": 4, "repetitionPenalty": 1.1}},
    _ACTS | {"generation": {"toolCallParser": "hermes"}, "rewards": _BY_ENVIRONMENT},
    _PLAYS | {"generation": {"toolCallParser": "hermes"}, "rewards": _BY_ENVIRONMENT},
    {"environments": [*_ACTS["environments"], *_PLAYS["environments"]], "training": {"maxToolCallingIterations": 4}},
    _ACTS | {"evaluation": _GYM | {"rewards": _BY_ENVIRONMENT}},
    {"tools": [{"function": "a:search"}, {"function": "a:research"}, {"function": "b.search:f"}]},
    _TOOLS | _pods({"replicas": 4}),
    _TWO | _pods({"environments": ["sql"]}, {"environments": ["wordle", "sql"]}),
    _TWO
    | _pods({"sessions": 64}, {"environments": ["sql"], "sessions": 1}, {"environments": ["wordle"], "sessions": 1})
    | {"training": {"maxStaleness": 2, "promptsPerStep": 4, "numGenerations": 8}},
    _TOOLS
    | _pods({"sessions": 1})
    | {
        "training": {"maxStaleness": 2},
        "generation": {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}]}},
    },
    _TWO | _pods({"environments": ["sql"]}, {"environments": []}) | {"podTemplate": {"hostNetwork": True}},
]
