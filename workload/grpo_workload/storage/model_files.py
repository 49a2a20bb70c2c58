"""A model's safetensors files, written tensor by tensor: no rank holds more of the model than it gathers at a time.

Names, shapes and the cut into files are known before a value is. So each file begins with its header, and tensors are
put where it says, in any order. The files are those of `huggingface_hub.save_torch_state_dict`, byte for byte. Each
rank writes some of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from huggingface_hub import constants, split_state_dict_into_shards_factory
from torch import Tensor

from grpo_workload.weights.wire import TensorSpec

FILE_BYTES = 5 * 10**9
"""Largest size of a file, unless a single tensor is larger."""

_METADATA = {"format": "pt"}
_HEADER_STEP = 8  # bytes of which a header's size is a multiple
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class ModelFiles:
    """The files of a model with the tensors `specs`, as far as `rank` of `world_size` writes them."""

    def __init__(self, specs: Sequence[TensorSpec], *, rank: int, world_size: int) -> None:
        """Plan the files; nothing is written."""
        by_name = {spec.name: spec for spec in specs}
        for spec in specs:  # all of them: every rank fails alike, before others wait for it
            if spec.dtype not in _DTYPES:
                raise TypeError(f"{spec.name} has the type {spec.dtype}, for which safetensors files have no name")
        split = split_state_dict_into_shards_factory(
            by_name,
            get_storage_size=lambda spec: spec.num_bytes,
            filename_pattern=constants.SAFETENSORS_WEIGHTS_FILE_PATTERN,
            max_shard_size=FILE_BYTES,
        )
        own = list(split.filename_to_tensors)[rank::world_size]
        self._headers = {file: _header([by_name[name] for name in split.filename_to_tensors[file]]) for file in own}
        self._places = {name: (file, place) for file in own for name, place in self._headers[file][1].items()}
        self._index: dict[str, Any] | None = None
        if split.is_sharded and rank == 0:
            self._index = {"metadata": {**split.metadata, **_METADATA}, "weight_map": split.tensor_to_filename}
        self._open: dict[str, IO[bytes]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether this rank writes the tensor."""
        return name in self._places

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor of this rank."""
        return self._places[name][0]

    def put(
        self, folder: Path, name: str, tensor: Tensor, wrap: Callable[[IO[bytes]], Any] = lambda file: file
    ) -> None:
        """Write the values of a tensor on any device into its file in `folder`. Raises OSError.

        `wrap` returns what is written to in place of a file.
        """
        file, place = self._places[name]
        if file not in self._open:
            self._open[file] = open(folder / file, "wb")  # noqa: SIM115  # `close` ends it
            self._open[file].write(self._headers[file][0])
        self._open[file].seek(len(self._headers[file][0]) + place)
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        wrap(self._open[file]).write(values.numpy().data)

    def close(self, folder: Path) -> list[Path]:
        """End the files of this rank, and return them; rank 0 adds the index. Raises OSError."""
        for file in self._open.values():
            file.close()
        written = [folder / file for file in self._open]
        if self._index is not None:
            written.append(folder / constants.SAFETENSORS_INDEX_FILE)
            written[-1].write_text(json.dumps(self._index, indent=2))
        return written


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file, and where each tensor's values begin behind them."""
    fields: dict[str, Any] = {"__metadata__": _METADATA}
    places, end = {}, 0
    for spec in sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name)):  # so each is aligned to its type
        places[spec.name], end = end, end + spec.num_bytes
        offsets = [places[spec.name], end]
        fields[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_STEP)
    return len(text).to_bytes(8, "little") + text, places
