"""Models are written tensor by tensor, by several ranks, into the same files as by the hub's library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

from grpo_workload.storage import model_files
from grpo_workload.storage.model_files import ModelFiles
from grpo_workload.weights.wire import TensorSpec


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "z.weight": torch.randn(30, 20).bfloat16(),
        "größe": torch.randn(7, 3),
        "large": torch.randn(500, 10),  # more than a file of the smaller kind
        "a.weight": torch.randn(20, 30).T.bfloat16(),  # not contiguous
        "count": torch.tensor(3),
        "b.weight": torch.randn(40, 20).bfloat16(),
        "empty": torch.empty(0, 4),
    }


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("size", [3000, 10**9])
def test_files_of_all_ranks_are_those_of_the_hubs_library_byte_for_byte(tmp_path, monkeypatch, size, ranks):
    monkeypatch.setattr(model_files, "FILE_BYTES", size)
    values = tensors()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    save_torch_state_dict(values, tmp_path / "theirs", metadata={"format": "pt"}, max_shard_size=size)
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in values.items()]
    parts = [ModelFiles(specs, rank=rank, world_size=ranks) for rank in range(ranks)]
    written: list[Path] = []
    for part in parts:
        for name in reversed(values):  # in any order
            if name in part:
                part.put(tmp_path / "ours", name, values[name])
        written += part.close(tmp_path / "ours")
    contents = [{path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()} for kind in ("ours", "theirs")]
    assert sorted(path.name for path in written) == sorted(contents[0])
    assert len(contents[0]) == (1 if size > 3000 else 3 + 1)
    assert contents[0] == contents[1]
    for name, tensor in ((n, t) for path in written if path.suffix != ".json" for n, t in load_file(path).items()):
        assert tensor.equal(values[name])
    assert all(sum(name in part for part in parts) == 1 for name in values), "each tensor is of one rank"
