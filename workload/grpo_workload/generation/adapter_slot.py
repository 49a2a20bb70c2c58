"""What a vLLM worker computes with as its adapter: tensors that were received, in place of a folder's.

vLLM takes adapters from folders alone. So an engine starts with an empty one (`empty_adapter`), which requests go by, and whenever vLLM
reads that folder again, what was received takes its place. vLLM reads it at the first request after each update: some releases forget
their adapters with every update (`reset_lora_state`), and for the others they are forgotten here (vllm/lora/, read in 0.26 and 0.32).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from grpo_workload.generation.vllm_api import adapter_renames


class AdapterSlot:
    """In the place of the model of a weight transfer: what it loads are an adapter's tensors, under peft's names, B already scaled."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._config = model, config
        self._manager = model.lora_manager
        self._tensors: dict[str, Tensor] = {}
        self._received: Any = None
        self._add = self._manager.add_adapter
        self._manager.add_adapter = lambda adapter: self._add(self._in_place_of(adapter))

    def clear(self) -> None:
        """Forget what was loaded and not used."""
        self._tensors = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep tensors, whose memory is used again."""
        self._tensors |= {name: tensor.clone() for name, tensor in weights}

    def fill(self) -> None:
        """Use what was loaded; nothing was, where an update was abandoned, and what was there before remains.

        Raises:
            ValueError: vLLM has no adapters for some of the modules; names them.
        """
        if not self._tensors:
            return
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        rank = max(tensor.size(0) for name, tensor in self._tensors.items() if ".lora_A." in name)
        received = LoRAModel.from_lora_tensors(
            1,
            self._tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device=str(next(iter(self._tensors.values())).device),
            dtype=self._config.lora_dtype,
            weights_mapper=adapter_renames(self._model),
        )
        self._check(received.loras)
        self._received = received
        self._manager.remove_all_adapters()
        self.clear()

    def _in_place_of(self, adapter: Any) -> Any:
        if self._received is None:
            return adapter
        self._received.id = adapter.id
        return self._received

    def _check(self, modules: Iterable[str]) -> None:
        """VLLM leaves out what it has no adapters for, without a word."""
        packed = self._manager.packed_modules_mapping
        having = {part for name in self._manager.supported_lora_modules for part in packed.get(name, [name])}
        if lacking := sorted({name.rpartition(".")[2] for name in modules} - having):
            names = ", ".join(sorted(having))
            raise ValueError(f"lora: vLLM has no adapters for {', '.join(lacking)} of this model, only for {names}; push merged would work")
