"""A run resumes with the base model that it began with: a moved branch is pinned, a changed folder is noticed."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from grpo_spec.trainer import TrainerConfig
from grpo_workload.storage import base_model as module
from grpo_workload.storage.base_model import Origin, fingerprint, settle_origin

OLD, NEW = "1" * 40, "2" * 40


def config(**sections: Any) -> TrainerConfig:
    rest = {"dataset": {"path": "unused"}, "rewards": [{"name": "r", "accuracy": {}}]}
    return TrainerConfig.model_validate(rest | {"model": {"name": "org/model"}} | sections)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with two commits of a model; its branch is at the older one."""
    entry = tmp_path / "models--org--model"
    for commit in (OLD, NEW):
        (entry / "snapshots" / commit).mkdir(parents=True)
        (entry / "snapshots" / commit / "config.json").write_text("{}")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(OLD)
    here = functools.partial(module.cached_file, cache_dir=tmp_path, local_files_only=True)
    monkeypatch.setattr(module, "cached_file", here)
    return entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (path := tmp_path / "model").mkdir()
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    return path


def test_a_run_stays_at_the_commit_it_began_with(hub: Path) -> None:
    began = settle_origin(config(), None)
    assert began == Origin(source="org/model", revision=None, commit=OLD)
    assert began.pin(config()).model.revision == OLD

    (hub / "refs" / "main").write_text(NEW)
    assert settle_origin(config(), None).commit == NEW
    assert settle_origin(config(), began) == began
    assert settle_origin(config(lora={}), began) == began


def test_adapters_refuse_another_revision_of_their_base_model(hub: Path) -> None:
    began = settle_origin(config(), None)
    asked: dict[str, Any] = {"model": {"name": "org/model", "revision": NEW}}
    said = f"^model: the adapters .* org/model at commit {OLD}.*use model.name: org/model and .*: {OLD}"
    with pytest.raises(ValueError, match=said):
        settle_origin(config(**asked, lora={}), began)
    assert settle_origin(config(**asked), began).commit == NEW
    asked["model"]["revision"] = OLD
    assert settle_origin(config(**asked, lora={}), began).commit == OLD


def test_a_missing_model_is_refused_and_its_field_named(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^model\.name: cannot load org/other"):
        settle_origin(config(model={"name": "org/other"}), None)


def test_a_hub_that_does_not_answer_may_be_asked_again(hub: Path) -> None:
    with pytest.raises(OSError, match=r"couldn't connect"):
        settle_origin(config(model={"name": "org/other"}), None)


def test_adapters_refuse_a_folder_whose_weights_have_changed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours: dict[str, Any] = {"model": {"path": str(folder)}}
    began = settle_origin(config(**ours), None)
    assert settle_origin(config(**ours, lora={}), began) == began

    (folder / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 20_000)
    said = rf"^model: the adapters .* the weights in {folder} \(fingerprint \w+\).*use the folder as it was"
    with pytest.raises(ValueError, match=said):
        settle_origin(config(**ours, lora={}), began)
    caplog.set_level(logging.WARNING)
    settle_origin(config(**ours), began)
    assert not caplog.text
    settle_origin(config(**ours, training={"beta": 0.1}), began)
    assert "from now on its KL divergence refers to the weights in" in caplog.text


def test_the_same_weights_in_another_folder_are_accepted(folder: Path) -> None:
    began = settle_origin(config(model={"path": str(folder)}), None)
    moved = folder.rename(folder.with_name("elsewhere"))
    assert settle_origin(config(model={"path": str(moved)}, lora={}), began).is_same(began)


def test_a_fingerprint_covers_exactly_the_weights_that_are_loaded(folder: Path) -> None:
    one = fingerprint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not loaded")
    (folder / "README.md").write_text("changed")
    assert fingerprint(folder) == one
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"^model.path: the weights in .* cannot be read: .*part-2"):
        fingerprint(folder)
    (folder / "part-2.safetensors").write_bytes(b"x" * 10)
    two = fingerprint(folder)
    (folder / "part-2.safetensors").write_bytes(b"y" * 10)
    assert len({one, two, fingerprint(folder)}) == 3
