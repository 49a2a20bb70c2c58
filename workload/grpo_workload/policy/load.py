"""Loads the policy's model by transformers, with the attention and the fused kernels for training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from grpo_workload.policy import attention, vision
from grpo_workload.spec.contract import Device
from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.inputs import VISION_FAMILIES
from grpo_workload.spec.trainer import TrainerConfig

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_NOT_RELOADED = ("gpt_oss",)  # vLLM 0.32 writes its experts and sinks past the loaders that it replaces for a reload


def load_model(config: TrainerConfig, device: Device) -> Any:
    """Load the model. ConfigError, naming the field, if it cannot be found or read, or cannot be trained."""
    field = config.model.field
    if config.model.path is not None and not Path(config.model.path).is_dir():
        raise ConfigError(
            f"{field}: there is no folder {config.model.path} in the container; "
            "is its volume mounted in every trainer pod?"
        )
    fields = _config_file(config)
    _refuse_unpushable(config, fields)
    attention.register()
    has_vision = fields.get("model_type") in VISION_FAMILIES
    try:
        model = (AutoModelForImageTextToText if has_vision else AutoModelForCausalLM).from_pretrained(
            config.model.source,
            revision=config.model.revision or "main",
            dtype=DTYPES[config.model.dtype],
            attn_implementation=config.model.attention,
        )
    except KeyError as error:  # families that look their attention up in a table of their own
        if error.args != (config.model.attention,):
            raise
        raise ConfigError(
            f"model.attention: {config.model.source} does not have {config.model.attention}; use eager"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{field}: cannot load {config.model.source}: {error}") from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"{field}: {config.model.source} holds adapters, which engines cannot load as a model; "
            "give a folder with a whole model, made by "
            "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)"
        )
    keep_own_calls(model)
    remove_noise(model)
    if has_vision:
        vision.adapt(model)
    if config.model.freeze_vision_tower:
        vision.freeze(model)
    packs = config.training.per_device_train_batch_size != 1
    attention.check_layers(model.config, config.model.attention, packs=packs)
    attention.check_softcap(model.config, config.model.attention)
    if config.model.use_liger_kernel and device == Device.CUDA:
        fuse(model)
    return model


def _config_file(config: TrainerConfig) -> dict[str, Any]:
    """Return the model's config.json; an empty dict if it cannot be read, as loading the model will say why."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(config.model.source, revision=config.model.revision or "main")
    except (OSError, ValueError):
        return {}
    return dict(fields)


def _refuse_unpushable(config: TrainerConfig, fields: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose trained weights engines could not take. What else they cannot, the first push shows."""
    if config.pushes_adapters:
        return
    quantization = fields.get("quantization_config")
    if quantization:  # transformers may load it in bfloat16, engines would not
        raise ConfigError(
            f"{config.model.field}: {config.model.source} holds weights that are quantized "
            f"({quantization.get('quant_method', 'unknown method')}), which cannot be trained; "
            "use a copy with weights in bfloat16"
        )
    if fields.get("model_type") in _NOT_RELOADED:
        raise ConfigError(
            f"{config.model.field}: {config.model.source} is a {fields['model_type']}, of which vLLM cannot replace "
            "all weights while it runs; use another model"
        )


def keep_own_calls(model: PreTrainedModel) -> None:
    """Give the models inside `model` classes of their own, so that what is later done to transformers' has no effect.

    vLLM runs families that it has no model for by transformers' classes, and then replaces the `__call__` of these.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not model:
            kind = type(module)
            own = {"__call__": nn.Module.__call__, "__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (kind,), own)


def remove_noise(model: nn.Module) -> None:
    """Set dropout, and noise on the inputs of experts, to 0: engines sample without, so training computes without.

    The configuration keeps its values, for those who load what is saved. Adapters' own dropout comes later, and stays.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            # Not `router_jitter_noise`, which some models use in evaluation, too.
            if isinstance(value, float) and ("dropout" in name or name in ("jitter_noise", "input_jitter_noise")):
                setattr(module, name, 0.0)


def restore_buffers(module: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    """Put `buffers`, by name, back into `module` on `device`: DeepSpeed has cast its own."""
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.to(device))


def fuse(model: Any) -> None:
    """Put fused kernels into the model's layers: PyTorch's for RMSNorm, Liger's (arXiv:2410.10989) for others."""
    num_norms = fuse_norms(model)
    try:  # an optional dependency, in GPU images alone
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError:
        logger.warning("model.useLigerKernel: liger-kernel is not in the image, so layers run unfused, which is slower")
        return
    # Not of models with a vision tower: with those it was never compared.
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN.keys() - set(VISION_FAMILIES):
        logger.warning(
            "model.useLigerKernel: Liger's kernels are not used for %s; layers run unfused", model.config.model_type
        )
        return
    # Not Liger's loss, which would replace the model's forward: `logprobs` computes what the loss needs.
    _apply_liger_kernel_to_instance(
        model, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=num_norms == 0
    )


def fuse_norms(model: nn.Module) -> int:
    """Replace the forward of each RMSNorm by PyTorch's fused kernel if that computes the same; returns how many.

    To launch, that kernel takes a tenth of the CPU time of Liger's, and launches are what a step of short micro-batches
    waits for.
    """
    norms = [module for module in model.modules() if _is_rms_norm(module)]
    for module in norms:
        module.forward = MethodType(_rms_norm, module)
    return len(norms)


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden, (hidden.size(-1),), norm.weight, norm.variance_epsilon)


def _is_rms_norm(module: nn.Module) -> bool:
    """Compare outputs for probe weights: classes of this name may multiply by 1 + weight (Gemma), or have a gate."""
    if (
        not type(module).__name__.endswith("RMSNorm")
        or not hasattr(module, "variance_epsilon")
        or list(module._parameters) != ["weight"]
    ):
        return False
    weight: Any = module._parameters["weight"]
    size = getattr(weight, "ds_shape", weight.shape)[-1]  # under ZeRO-3 each rank holds a part of it
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 2.0, size, device="cpu"))}
    hidden = torch.linspace(-1.0, 3.0, 2 * size, device="cpu").view(1, 2, size)
    return torch.allclose(type(module).forward(probe, hidden), _rms_norm(probe, hidden), rtol=1e-5, atol=1e-6)
