"""Builds the vLLM of a rank's own process, and loads weights into it. What vLLM cannot do is refused by name."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import vllm
from transformers.integrations import deepspeed

from grpo_spec.contract import Device
from grpo_spec.errors import ConfigError
from grpo_workload.generation.audit import audited
from grpo_workload.generation.base import Weights
from grpo_workload.generation.vllm_api import repack_for_cpu
from grpo_workload.ranks.environment import show
from grpo_workload.weights.digest import with_sums


def build_engine(field: str, arguments: dict[str, Any]) -> Any:
    """Return vLLM's `LLM`; collective. ConfigError when vLLM refuses the arguments, or the model that `field` names."""
    # At each push this logger warns about layers that get no weight: tied ones, and those without weights.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_Once())
    # vLLM builds families that it has no model for by transformers, which under ZeRO-3 would divide their weights too.
    policys = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    show("bitsandbytes")  # engineArgs.quantization may ask for it
    try:
        return vllm.LLM(**arguments)
    except (TypeError, ValueError) as error:  # unknown arguments; values that vLLM's own configuration refuses
        raise ConfigError(f"generation: vLLM refuses these settings: {error}") from error
    except (AttributeError, KeyError, NotImplementedError) as error:  # fields or kernels that its model does not find
        raise _refusal(field, "build this model", error) from error
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = policys


def load_weights(engine: Any, field: str, weights: Weights, *, device: Device, is_initial: bool) -> None:
    """Replace all weights of `engine`; collective.

    Raises:
        ConfigError: `is_initial`, and vLLM cannot replace weights of such a model, which `field` names.
        WeightsDifferError: see `audited`.
    """
    try:
        engine.collective_rpc(partial(_load, weights=weights, device=device, is_initial=is_initial))
    except (AttributeError, NotImplementedError) as error:
        if not is_initial:
            raise
        raise _refusal(field, "replace the weights of this model while it runs", error) from error


def _load(worker: Any, weights: Weights, *, device: Device, is_initial: bool) -> None:
    model, config = worker.get_model(), worker.vllm_config.model_config
    with audited(model, is_initial=is_initial, is_quantized=config.quantization is not None):
        # Without an iterator vLLM would load the original checkpoint again.
        worker.reload_weights(weights_iterator=with_sums(weights, device.value), is_checkpoint_format=True)
        if device == Device.CPU:
            repack_for_cpu(model)


def _refusal(field: str, what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{field}: vLLM {vllm.__version__} cannot {what}: {type(error).__name__}: {error}")


class _Once(logging.Filter):
    """Logs each message once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is new."""
        is_new = (message := record.getMessage()) not in self._seen
        self._seen.add(message)
        return is_new
