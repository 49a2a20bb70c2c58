"""The policy's model as transformers loads it, with the kernels that it is trained with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_workload import attention
from grpo_workload.config import TrainerConfig
from grpo_workload.contract import Device

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(config: TrainerConfig, device: Device) -> Any:
    """The model as transformers loads it; ValueError naming the field when it cannot be found or read."""
    field = "model.name" if config.model.name is not None else "model.path"
    if config.model.path is not None and not Path(config.model.path).is_dir():
        raise ValueError(f"{field}: there is no folder {config.model.path} in the container; is its volume mounted in every trainer pod?")
    attention.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model.source,
            revision=config.model.revision or "main",
            dtype=DTYPES[config.model.dtype],
            attn_implementation=config.model.attention,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{field}: cannot load {config.model.source}: {error}") from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{field}: {config.model.source} holds adapters, which engines cannot load as a model; give a folder with a whole one: "
            "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...) makes it"
        )
    attention.check_packable(model.config)
    if config.model.use_liger_kernel and device == Device.CUDA:
        fuse(model)
    return model


def fuse(model: Any) -> None:
    """Put Liger's kernels into the model's layers (arXiv:2410.10989), where there are some for its type and the package is there."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError:
        logger.warning("model.useLigerKernel: liger-kernel is not in the image; layers run unfused, which is slower")
        return
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        logger.warning("model.useLigerKernel: Liger knows no %s; its layers run unfused", model.config.model_type)
        return
    # The loss is ours (`logprobs`): Liger's would replace the model's forward.
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
