"""Makes a vLLM worker use adapter tensors that it received, in place of those in a folder.

vLLM takes adapters only from folders. So an engine starts with an empty adapter (`pod.empty_adapter`), which requests
name. When vLLM reads that folder again, the received tensors take its place. It reads the folder at the first request
after each update, with which it drops its adapters (`reset_lora_state`, read in 0.32 and 0.33).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpo_workload.generation.arrivals import Arrivals
from grpo_workload.generation.vllm_api import adapter_renames
from grpo_workload.weights.differ import MARK, WeightsDifferError
from grpo_workload.weights.digest import words


class AdapterSlot:
    """Stands in for the model in a weight transfer; takes an adapter's tensors, named as modules in checkpoints are."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._config = model, config
        self._manager = model.lora_manager
        self._tensors: dict[str, Tensor] = {}
        self._received: Any = None
        self._add = self._manager.add_adapter
        self._manager.add_adapter = lambda adapter: self._add(self._in_place_of(adapter))

    def clear(self) -> None:
        """Drop tensors that were loaded but not used."""
        self._tensors = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep copies of the tensors, which their digests follow; their memory is reused."""
        self._arrivals = Arrivals(self._manager.device)
        self._tensors = {name: tensor.clone() for name, tensor in self._arrivals.received(weights)}

    def fill(self) -> None:
        """Use the loaded tensors. After an abandoned update there are none, and the adapter stays as it was.

        Raises:
            ValueError: names the modules that vLLM has no adapters for.
            WeightsDifferError: names the tensors that are not those that were sent.
        """
        tensors, self._tensors = self._tensors, {}  # a refused update is finished once more
        if not tensors:
            return
        self._arrivals.check()
        # Imported here: this module is loaded as a plugin, before vLLM is ready to import its models.
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.utils import parse_fine_tuned_lora_name

        rank = max(tensor.size(0) for name, tensor in tensors.items() if ".lora_A." in name)
        renames = adapter_renames(self._model)
        received = LoRAModel.from_lora_tensors(
            1,
            tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device=str(next(iter(tensors.values())).device),
            dtype=self._config.lora_dtype,
            weights_mapper=renames,
        )
        self._check(received.loras)
        for name, tensor in tensors.items():
            module, is_a = parse_fine_tuned_lora_name(name, renames)
            kept = received.loras[module].lora_a if is_a else received.loras[module].lora_b
            if not torch.equal(words(kept.flatten()), words(tensor.to(kept).flatten())):  # also NaN
                raise WeightsDifferError(f"{MARK}vLLM keeps something else than {name} as it was sent")
        self._received = received

    def _in_place_of(self, adapter: Any) -> Any:
        if self._received is None:
            return adapter
        self._received.id = adapter.id
        return self._received

    def _check(self, modules: Iterable[str]) -> None:
        """Refuse modules that vLLM has no adapters for: it would silently ignore them."""
        packed = self._manager.packed_modules
        taken = {part for name in self._manager.modules for part in packed.get(name, [name])}
        if lost := set(modules) - taken:
            raise ValueError(
                f"lora: vLLM has no adapters for {_kinds(lost)} of this model, only for {_kinds(taken)}; "
                "push merged would work"
            )


def _kinds(modules: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
