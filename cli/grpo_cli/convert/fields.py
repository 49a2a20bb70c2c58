"""Converters of options' values: by the type of the field in the spec, or by the name of the fact. Pure."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_cli.convert import values as v
from grpo_operator.api.faults import section_of
from grpo_operator.api.spec import GRPOJobSpec

Convert = Callable[[Any], Any]

# Values of fields that tools spell otherwise than the spec.
_SPELLINGS = {
    "model.dtype": {"bfloat16": "bf16 auto", "float16": "fp16", "float32": "fp32"},
    "model.attention": {"varlen": "flash_attention_2 flash_attn flash_attn_2 flash_attention_3"},
    "training.scaleRewards": {"group": "true", "none": "false"},
    # GSPO-token: the same gradient, since all tokens of a completion have one advantage.
    "training.importanceSamplingLevel": {"sequence": "sequence_token"},
    "dataset.overlongPrompts": {"truncate": "left"},
}
_FIELDS: dict[str, Convert] = {
    "training.topK": lambda value: max(0, v.integer(value)),  # the whole vocabulary is 0 here, -1 elsewhere
    "generation.gpuMemoryUtilization": v.share,
    "lora.targetModules": lambda value: [name.replace("all_linear", "all-linear") for name in v.texts(value)],
    "lora.r": v.integer,  # 0 where LoRA is off
}
_FACTS: dict[Convert, str] = {
    v.word: "dataset kl_loss_type reward_file reward_function",
    v.names: "dataset_configs swift_dataset eval_dataset verl_files",
    v.texts: "rewards reward_weights trackers",
    v.as_is: "vllm_mode eval_strategy vllm_device mixed_precision distributed_type system",
    v.boolean: "bf16 fp16 use_cpu use_lora offload correct_importance use_vllm sleep dynamic_sample offload_generating "
    "use_kl_loss eval_samples norm_by_std bypass overlong_buffer",
    v.positive: "per_device steps_per_generation generation_batch accumulation server_copies nodes processes per_node "
    "verl_batch",
    v.integer: "max_steps prompt overlong_length overlong_cache lora_rank verl_steps resample_times tool_turns",
    v.number: "epochs warmup warmup_ratio save_steps eval_steps min_lr_ratio num_cycles kl_in_reward_coef "
    "overlong_weight rollout_is_threshold",
    v.deepspeed: "deepspeed",
    v.fsdp: "fsdp",
}
_OF_FACTS = {fact: convert for convert, facts in _FACTS.items() for fact in facts.split()}


def converter(path: str, fact: str = "") -> Convert:
    """Return how values of options become the fact, or the field at `path`; those of no field stay as they are."""
    if fact in _OF_FACTS:
        return _OF_FACTS[fact]
    return _FIELDS.get(path) or _by_type(path)


def default(path: str) -> Any:
    """Return what the field at `path` is where no job sets it."""
    found = _find(path)
    return None if found is None else found.default


def _by_type(path: str) -> Convert:
    found = _find(path)
    if found is None:
        return v.as_is
    kind = _kind(found.annotation)
    if get_origin(kind) is Literal and isinstance(get_args(kind)[0], str):
        spelled = _SPELLINGS.get(path, {})
        others = {word for words in spelled.values() for word in words.split()}
        words = {value: f"{value} {spelled.get(value, '')}" for value in get_args(kind) if value not in others}
        taken = f"{found.default} is taken; " if found.default else ""
        return v.one_of(words, f"{{value}} is not supported: {taken}use {', '.join(words)}")
    is_positive = any(getattr(bound, "ge", 0) >= 1 for bound in found.metadata)
    by_kind = {bool: v.boolean, float: v.number, str: v.word, tuple: v.texts, dict: v.mapping}
    return by_kind.get(get_origin(kind) or kind, v.positive if is_positive else v.integer)


def _find(path: str) -> FieldInfo | None:
    section: type[BaseModel] | None = GRPOJobSpec
    found = None
    for part in path.split("."):
        fields = section.model_fields.values() if section else ()
        found = next((field for field in fields if field.alias == part), None)
        section = section_of(found.annotation) if found else None
    return found


def _kind(annotation: Any) -> Any:
    """The type of a field besides None."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return _kind(next(one for one in get_args(annotation) if one is not types.NoneType))
    return annotation
