"""The subject of a check of a model: the job, and the model on the meta device."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_workload.capacity.states import num_parameters
from grpo_workload.policy.adapters.lora import Adapters, add_adapters
from grpo_workload.policy.model.load import empty_model, read_fields


class Subject:
    """A job, its model's configuration, and the model without weights; what is asked for is made once."""

    def __init__(self, contract: Contract, gpu_bytes: int | None = None) -> None:
        """`gpu_bytes`: memory of a rank's GPU; None if that is not known, or ranks compute on CPUs."""
        self.contract, self.config, self.gpu_bytes = contract, contract.config, gpu_bytes

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The model's config.json. Raises ConfigError if it cannot be read."""
        return read_fields(self.config)

    @cached_property
    def model(self) -> Any:
        """The model on the meta device, with adapters from their first use on. ConfigError if it cannot be made."""
        return empty_model(self.config)

    @cached_property
    def _adapters(self) -> Adapters | ConfigError | None:
        try:
            _ = self.num_quantized  # counted before adapters wrap the layers
            with torch.device("meta"):  # peft would compute initial values
                return add_adapters(self.model, self.config)
        except ConfigError as error:  # they cannot be tried again: some are in the model
            return error

    @property
    def adapters(self) -> Adapters | None:
        """The adapters in `model`; None without `lora`. ConfigError as `add_adapters`."""
        if isinstance(self._adapters, ConfigError):
            raise self._adapters
        return self._adapters

    @property
    def num_adapted(self) -> int | None:
        """Number of parameters of the adapters; None without `lora`."""
        return num_parameters(self.adapters.trained()) if self.adapters else None

    @cached_property
    def num_quantized(self) -> int:
        """Number of parameters that are in 4 bits (`lora.loadIn4Bit`). ConfigError if none can be."""
        if self.config.lora is None or not self.config.lora.load_in_4bit:
            return 0
        from grpo_workload.policy.adapters.four_bit import layers  # late: see `environment.show`

        return num_parameters(layer.weight for layer in layers(self.model, self.config.lora).values())

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model without adapters; tied ones count once."""
        adapted = self.num_adapted or 0  # before the others are counted: this makes the adapters
        return num_parameters(self.model.parameters()) - adapted

    @property
    def has_vllm(self) -> bool:
        """Whether vLLM samples for the job."""
        return self.config.generation.engine == "vLLM"

    @property
    def engines(self) -> dict[str, int]:
        """The number of GPUs for one copy of the model in each engine, by the field that says it."""
        if self.contract.engines:
            return {f"generation.tensorParallel of engine {e.name}": e.tensor_parallel for e in self.contract.engines}
        return {"generation.tensorParallel": self.config.generation.tensor_parallel}
