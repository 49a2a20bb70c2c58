"""Loads the policy's model by transformers, with the attention and the fused kernels for training."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import VISION_FAMILIES
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.model_errors import explained
from grpo_workload.policy.model import attention, rope, tiles, vision
from grpo_workload.policy.model.one_reader import one_rank_reads

logger = logging.getLogger(__name__)

_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")  # attributes of modules
_OF_ATTENTION = re.compile("attn_implementation|flash.?attention|`kernels`", re.IGNORECASE)  # in errors' words
_MLP_KERNELS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}  # Liger's, with their activations
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    config: TrainerConfig, device: torch.device, later: Callable[[Any], Collection[str]] = lambda _: ()
) -> Any:
    """Load the model, which `training.model_check` has accepted; collective, since rank 0 alone reads it.

    Weights go to `device`, but those that `later` names: see `one_rank_reads`. ConfigError, naming the field, if that
    fails.
    """
    with _explained(config), one_rank_reads(device, later):
        model = _kind(config).from_pretrained(
            config.model.source,
            revision=config.model.revision or "main",
            dtype=DTYPES[config.model.dtype],
            attn_implementation=config.model.attention,
        )
    keep_own_calls(model)
    rope.keep_factors(model, config.generation.max_model_len)
    remove_noise(model)
    if vision.has_vision(model.config):
        vision.adapt(model)
    attention.keep_bounds(model)  # after what changes bounds
    for part in vision.left_out(model).values():
        part.requires_grad_(False)
    if config.model.freeze_vision_tower:
        vision.freeze(model)
    if config.model.use_liger_kernel and device.type == "cuda":
        fuse(model)
    if config.parallelism.gradient_checkpointing:
        tiles.wrap(model)  # after what changes an MLP's forward
        tiles.turn(model, on=True)
        if config.parallelism.zero_stage == 3:
            tiles.gather_at_once(model)
    return model


def empty_model(config: TrainerConfig) -> Any:
    """Make the model without weights, on the meta device, of its configuration alone. ConfigError as `load_model`."""
    with _explained(config, Exception), torch.device("meta"):
        return _kind(config).from_config(
            read_config(config),
            dtype=DTYPES[config.model.dtype],
            attn_implementation=config.model.attention,
        )


def read_fields(config: TrainerConfig) -> dict[str, Any]:
    """Return the model's config.json as it is. ConfigError if it cannot be found or read."""
    with _explained(config):
        fields, _ = PreTrainedConfig.get_config_dict(config.model.source, revision=config.model.revision or "main")
    return dict(fields)


def read_config(config: TrainerConfig) -> PreTrainedConfig:
    """Return the model's configuration. ConfigError also if transformers does not know the family."""
    with _explained(config, Exception):
        return AutoConfig.from_pretrained(config.model.source, revision=config.model.revision or "main")


def holds_adapters(config: TrainerConfig) -> bool:
    """Whether there are adapters where the model should be. ConfigError if that cannot be found out."""
    with _explained(config):
        revision = config.model.revision or "main"
        return find_adapter_config_file(config.model.source, revision=revision) is not None


def _kind(config: TrainerConfig) -> Any:
    attention.register()
    has_vision = read_fields(config).get("model_type") in VISION_FAMILIES
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


@contextmanager
def _explained(config: TrainerConfig, *kinds: type[Exception]) -> Iterator[None]:
    """Within it, raise ConfigError for what transformers says about the model, or its attention; see `explained`."""
    model = config.model
    with explained(model, "load", *kinds):
        try:
            yield
        except KeyError as error:  # families that look their attention up in a table of their own
            if error.args != (model.attention,):
                raise
            raise ConfigError(f"model.attention: {model.source} does not have {model.attention}; use eager") from error
        except RuntimeError as error:  # also raised by collectives and devices
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ConfigError(
                f"{model.field}: the weights in {model.source} do not have the shapes that its config.json says; the "
                "log lists them"
            ) from error
        except (ValueError, ImportError) as error:
            if not _OF_ATTENTION.search(str(error)):
                raise
            cures = " or ".join(kind for kind in ("varlen", "eager") if kind != model.attention)
            raise ConfigError(
                f"model.attention: {model.source} does not have {model.attention}; use {cures}: {error}"
            ) from error


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
    """Set dropout and noise on the inputs of experts to 0, and choose experts as evaluation does: engines sample so.

    The configuration keeps its values, for those who load what is saved. Adapters' own dropout comes later, and stays.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "router_jitter_noise"):  # Phi-3.5-MoE's routers sample experts in training
            module.eval()
            module.train = MethodType(_stay, module)  # type: ignore[method-assign]
        for name, value in vars(module).items():
            # Not `router_jitter_noise`, which some models use in evaluation, too.
            if isinstance(value, float) and ("dropout" in name or name in _NOISE):
                setattr(module, name, 0.0)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


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
    apply_fitting(_apply_liger_kernel_to_instance, model, rms_norm=num_norms == 0)


def apply_fitting(apply: Callable[..., None], model: Any, *, rms_norm: bool) -> None:
    """Call Liger's `apply` for the kernels that fit the model.

    Liger does not look at the activation. Its kernel for experts, which has no switch of its own, is slower than
    transformers' (benchmarks/results/expert_layer_h100.jsonl), and compiles more than a hundred variants first.
    """
    # Not Liger's loss, which would replace the model's forward: `logprobs` computes what the loss needs.
    common = {"cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": rms_norm}
    text = model.config.get_text_config()
    activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    has_experts = any(path.endswith("experts") for path, _ in model.named_modules())
    unfit = {name for name, fitting in _MLP_KERNELS.items() if has_experts or activation not in fitting}
    try:
        apply(model, **common, **dict.fromkeys(unfit, False))
    except Exception as error:  # nothing is lost: each kernel computes what the layer that it replaces does
        logger.warning(
            "model.useLigerKernel: not all of Liger's kernels fit this model; some layers run unfused: %s", error
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
