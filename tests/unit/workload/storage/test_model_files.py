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


def test_rare_types_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = {
        "unsigned": torch.arange(6, dtype=torch.int32).to(torch.uint16),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "scale": torch.ones(5).to(torch.float8_e8m0fnu),
    }
    specs = [TensorSpec(name, one.dtype, tuple(one.shape)) for name, one in values.items()]
    files = ModelFiles(specs, rank=0, world_size=1)
    for name, tensor in values.items():
        files.put(tmp_path, name, tensor)
    (file,) = files.close(tmp_path)
    read = load_file(file)
    assert all(torch.equal(read[name].view(torch.uint8), one.view(torch.uint8)) for name, one in values.items())


def test_a_type_without_a_name_is_refused_by_every_rank() -> None:
    """Else the others would gather weights with one that has failed."""
    specs = [TensorSpec("a", torch.float32, (3,)), TensorSpec("b", torch.complex128, (3,))]
    for rank in range(2):
        with pytest.raises(TypeError, match=r"^b has the type torch\.complex128"):
            ModelFiles(specs, rank=rank, world_size=2)
