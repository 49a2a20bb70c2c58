"""Specs that break a rule about fields, which CEL, in the API server, and pydantic refuse with the same message."""

from typing import Any

GYM: dict[str, Any] = {"dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}}, "everySteps": 5}
RULE = {"name": "r", "reasons": ["NodeLost", "OOMkilled"], "action": "RestartFree"}
PLAIN = {"engine": "Transformers"}


def reward(**fields: object) -> dict:
    """Return a change of a job: its only reward."""
    return {"rewards": [{"name": "r"} | fields]}


def engines(elastic: dict | None = None, **group: int) -> dict:
    """Return a change of a job: engines of their own."""
    server = {"groups": [{"name": "gen", "gpus": 1} | group]} | ({"elastic": elastic} if elastic else {})
    return {"generation": {"topology": "Server", "server": server}}


RLOO = {"advantageEstimator": "rloo", "multiObjectiveAggregation": "normalize_then_sum"}
ROWS = {"name": "d", "config": "c"}
OVER_PODS: dict[str, Any] = {"replicas": 2, "podsPerEngine": 2}
UNREAD: list[tuple[dict, str]] = [
    ({"model": {"path": "/m", "name": None, "revision": "v1"}}, "revision needs name"),
    ({"dataset": {"path": "/d", "config": "main"}}, "config needs name"),
    ({"dataset": GYM["dataset"] | {"split": "test"}}, "split needs name or path"),
    (reward(format={"tags": ["a"]}, memoryLimit="1Gi"), "memoryLimit needs function, factory or accuracy"),
    (
        reward(softOverlong={"maxLength": 1024, "cacheLength": 256}),
        "maxLength less cacheLength must be less than training.maxCompletionLength",
    ),
    ({"storage": {"export": {"everySteps": 5, "lora": "adapters"}}}, "storage.export.lora adapters needs lora"),
    ({"failurePolicy": {"rules": [RULE]}}, "reasons must be written as in status.lastFailure.reason"),
    ({"network": {"rdmaCount": 4}}, "rdmaCount needs rdmaResource"),
    (
        {"generation": PLAIN | {"engineArgs": {"enforce_eager": True}}},
        "engine Transformers has none of vLLM's settings",
    ),
    ({"generation": {"maxModelLen": 256}}, "maxModelLen must be more than training.maxCompletionLength"),
    *(
        ({"evaluation": GYM | {"metricForBestModel": metric}}, "must be a metric of evaluations")
        for metric in ("reward", "eval/rewards/acuracy/mean")
    ),
]
"""Settings that nothing would read, or that could not have the effect that they are set for."""

OF_TRAINING: list[tuple[dict, str]] = [
    (
        {"maxStaleness": 1, "stepsPerGeneration": 2},
        "maxStaleness over 0 needs stepsPerGeneration 1 and numIterations 1",
    ),
    ({"maxStaleness": 1, "numIterations": 2}, "needs stepsPerGeneration 1 and numIterations 1"),
    ({"lossType": "cispo"}, "epsilonHigh is the largest ratio itself, at least 1"),
    ({"lossType": "sapo", "delta": 4}, "bound the ratio in their own way: delta must not be set"),
    ({"lossType": "gmpo", "importanceSamplingLevel": "sequence"}, "importanceSamplingLevel token would work"),
    ({"epsilonHigh": 3, "delta": 4}, "delta must be more than 1 + epsilonHigh (or 1 + epsilon)"),
    (RLOO, "advantageEstimator other than grpo needs multiObjectiveAggregation sum_then_normalize"),
    ({"klInReward": True}, "klInReward needs beta over 0"),
    ({"maxStaleness": 1, "maxResampleTimes": 1}, "maxStaleness over 0 needs maxResampleTimes 0"),
    ({"presencePenalty": 0.5, "maxStaleness": 1}, "presencePenalty and frequencyPenalty need maxStaleness 0"),
    ({"syncRefModel": True}, "syncRefModel needs beta over 0"),
    ({"lrSchedulerType": "constant", "warmupSteps": 5}, "constant has no warm-up"),
    ({"lrSchedulerKwargs": {"power": 2}}, "other values of lrSchedulerType take none"),
]
RULES: list[tuple[dict, str]] = [
    *UNREAD,
    *(({"training": fields}, complaint) for fields, complaint in OF_TRAINING),
    ({"model": {"name": "a", "path": "/b"}}, "exactly one of name, path must be set"),
    ({"dataset": {}}, "exactly one of name, path, reasoningGym must be set"),
    ({"dataset": {"name": "d", "promptTemplate": "no place"}}, "promptTemplate must contain {prompt}"),
    (reward(), "exactly one of accuracy, environment, exactMatch, "),
    (reward(accuracy={}, env=["KEY"]), "env needs function or factory: built-in rewards read no variables"),
    (
        reward(softOverlong={"maxLength": 4, "cacheLength": 5}),
        "cacheLength must not be more than maxLength; 4 would work",
    ),
    ({"training": {"syncRefModel": True, "beta": 0.1}, "lora": {"r": 8}}, "syncRefModel needs a job without lora"),
    ({"lora": {"push": "adapters"}}, "needs generation.topology Server or NodeLocal"),
    (engines() | {"lora": {"push": "adapters", "modulesToSave": ["lm_head"]}}, "cannot send modulesToSave"),
    (engines() | {"lora": {"push": "adapters", "r": 513}}, "r of at most 512"),
    ({"lora": {"path": "/data/sft", "modulesToSave": ["lm_head"]}}, "path needs push merged"),
    (engines() | {"lora": {"loadIn4Bit": True, "push": "adapters"}}, "loadIn4Bit needs push merged"),
    (
        {"lora": {"loadIn4Bit": True}, "parallelism": {"zeroStage": 3}},
        "lora.loadIn4Bit needs parallelism.zeroStage 0, 1 or 2",
    ),
    (
        {"device": {"type": "cpu"}, "model": {"name": "m", "dtype": "float16"}},
        "model.dtype float16 needs device.type cuda",
    ),
    (
        engines() | {"parallelism": {"offloadOptimizer": "generating"}},
        "parallelism.offloadOptimizer generating needs generation.topology Colocate",
    ),
    (
        {"lora": {"targetModules": ["all-linear", "lm_head"]}},
        "targetModules must be either all-linear or names of modules",
    ),
    (
        {"lora": {"targetModules": ["o_proj"], "modulesToSave": ["o_proj"]}},
        "a module must not be in both targetModules and modulesToSave",
    ),
    ({"rendezvous": {"port": 2000, "statusPort": 2000}}, "port and statusPort must differ"),
    (
        {"scheduling": {"timeoutSeconds": 601}},
        "scheduling.timeoutSeconds must be at most rendezvous.timeoutSeconds, after which pods that run give up on "
        "those that have no node; 600 would work",
    ),
    ({"cache": {"readOnly": True}}, "readOnly needs claimName"),
    ({"dataset": ROWS, "evaluation": GYM | {"dataset": ROWS}}, "evaluation.dataset has the same rows as dataset"),
    ({"evaluation": GYM | {"temperature": 0.001}}, "must be 0 or at least 0.01"),
    ({"evaluation": GYM | {"temperature": 0, "numGenerations": 2}}, "temperature 0 needs evaluation.numGenerations 1"),
    (
        {"evaluation": GYM | reward(stopped={}, timeoutSeconds=601)},
        "evaluation.rewards[].timeoutSeconds must be at most rendezvous.timeoutSeconds, after which the other "
        "ranks give up; 600 would work",
    ),
    (engines(elastic={"maxReplicas": 3}), "elastic needs failurePolicy.onGenerationFailure RestartGeneration"),
    (engines(podsPerEngine=2, replicas=3), "podsPerEngine must divide replicas, the number of pods"),
    (engines(**OVER_PODS, tensorParallel=4), "tensorParallel must divide gpus x podsPerEngine"),
    (
        engines(elastic={"maxReplicas": 2}, **OVER_PODS),
        "podsPerEngine of the first group must be 1 with elastic, which counts single pods",
    ),
    (
        engines(**OVER_PODS) | {"lora": {"push": "adapters"}},
        "lora.push adapters needs podsPerEngine 1 in all generation.server.groups",
    ),
]
