"""Values as YAML, a shell or hydra write them -> values of a job's spec. Pure; ValueError says what is wrong with one."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Any

from grpo_cli.convert.rows import LeftError

_TRUE, _FALSE = {"true", "yes", "1", "on"}, {"false", "no", "0", "off"}
_NONE = {"", "none", "null", "~"}


def is_none(value: Any) -> bool:
    """Whether a value says nothing."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NONE)


def boolean(value: Any) -> bool:
    """True or False, also as the words that command lines take."""
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"true or false is needed, not {value!r}")
    return word in _TRUE


def number(value: Any) -> float:
    """A finite number; YAML takes 1e-6 for text."""
    try:
        given = float(value)
    except (TypeError, ValueError):
        given = math.nan
    if not math.isfinite(given):
        raise ValueError(f"a number is needed, not {value!r}")
    return given


def integer(value: Any) -> int:
    """A whole number."""
    if (given := number(value)) != int(given):
        raise ValueError(f"a whole number is needed, not {value!r}")
    return int(given)


def top_k(value: Any) -> int:
    """Tokens to sample from: 0 is the whole vocabulary here, and -1 elsewhere."""
    return max(0, integer(value))


def positive(value: Any) -> int:
    """A whole number of at least 1."""
    if (given := integer(value)) < 1:
        raise ValueError(f"a number of at least 1 is needed, not {value!r}")
    return given


def word(value: Any) -> str:
    """A name or path."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"a name is needed, not {value!r}")
    return value


def names(value: Any) -> list[str]:
    """A list of at least one word."""
    if not (found := texts(value)):
        raise ValueError(f"a name is needed, not {value!r}")
    return found


def texts(value: Any) -> list[str]:
    """A list of words: a list, Python's or JSON's notation of one, or words with commas or spaces between them."""
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    text = str(value).strip()
    if text.startswith("["):
        inner = text[1:-1]
        return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    return [part for part in re.split(r"[,\s]+", text) if part]


def mapping(value: Any) -> dict[str, Any]:
    """A dict, or JSON or Python's notation of one."""
    if isinstance(value, dict):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(str(value))
        except (ValueError, SyntaxError):
            continue
        if isinstance(found, dict):
            return found
    raise ValueError(f"key-value pairs are needed, not {value!r}")


def equal(value: Any, harmless: Any) -> bool:
    """Whether `value`, in whatever notation, is `harmless`."""
    if isinstance(harmless, bool):
        return str(value).strip().lower() in (_TRUE if harmless else _FALSE)
    if isinstance(harmless, int | float):
        try:
            return float(value) == harmless
        except (TypeError, ValueError):
            return False
    return str(value).strip().lower() == str(harmless).lower()


def one_of(words: dict[str, Any], otherwise: str) -> Callable[[Any], Any]:
    """A converter by word; other words are left, since `otherwise`, which gets {value}."""

    def convert(value: Any) -> Any:
        try:
            return words[str(value).strip().lower()]
        except KeyError:
            raise LeftError(otherwise.format(value=value)) from None

    return convert


dtype = one_of(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "float32": "float32", "fp32": "float32"}
    | {"auto": "bfloat16"},
    "no such type here: bfloat16, float16 or float32 would do",
)

attention = one_of(
    {"flash_attention_2": "varlen", "flash_attn": "varlen", "flash_attn_2": "varlen", "flash_attention_3": "varlen", "varlen": "varlen"}
    | {"sdpa": "sdpa", "eager": "eager"},
    "{value} is none of varlen, sdpa, eager, flash_attention_2: varlen is taken",
)

scheduler = one_of(
    {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    "the schedule {value} does not exist here: linear, cosine or constant, with warmupSteps; linear is taken",
)

scale_rewards = one_of(
    {"group": "group", "batch": "batch", "none": "none", "true": "group", "false": "none"}, "group, batch or none would do, not {value}"
)

loss_type = one_of(
    {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo"},
    "the loss {value} does not exist here: dapo is taken; grpo and dr_grpo would do too",
)

correction = one_of(
    {word: word for word in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    "{value} does not exist here: sequence_mask is taken; docs/training.md has the others",
)


def trackers(value: Any) -> list[str]:
    """Trackers that exist here; none is no tracker."""
    wanted = [name for name in texts(value) if name not in ("none", "console")]
    if unknown := sorted(set(wanted) - {"tensorboard", "wandb", "mlflow"}):
        raise LeftError(f"no such tracker here: {', '.join(unknown)}; tensorboard, wandb and mlflow would do")
    return wanted


def target_modules(value: Any) -> list[str]:
    """Names of modules; all-linear alone is all of them."""
    return [name.replace("all_linear", "all-linear") for name in texts(value)]


def share(value: Any) -> float:
    """A share of a GPU's memory, at most 0.9."""
    if (given := number(value)) > 0.9:
        raise LeftError("at most 0.9 of a GPU is given to vLLM: 0.9 would do")
    return given


def deepspeed(value: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, or the name or path of one -> its stage and whether the optimizer is offloaded."""
    if isinstance(value, dict) or str(value).lstrip().startswith("{"):
        zero = mapping(value).get("zero_optimization", {})
        device = zero.get("offload_optimizer", {}).get("device", "none")
        return {"stage": integer(zero.get("stage", 0)), "offload": device not in ("none", None)}
    found = re.search(r"(?:zero|z|stage)[-_]?([0-3])", str(value).lower())
    if found is None:
        raise LeftError("the stage is not to be seen from the name: set parallelism.zeroStage and offloadOptimizer")
    return {"stage": int(found[1]), "offload": "offload" in str(value).lower()}


def fsdp(value: Any) -> dict[str, Any]:
    """FSDP's strategy as transformers and accelerate write it -> the ZeRO stage that shards the same."""
    words = str(value).lower()
    stage = 0 if "no_shard" in words else 2 if "shard_grad_op" in words or words == "false" else 3
    return {"stage": stage, "offload": "offload" in words}
