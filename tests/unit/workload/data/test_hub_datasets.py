"""Datasets of the hub are read at the commit that their branch had when the run began: the real client, a small hub."""

import json
import shutil

import pytest

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.origin import origin_of, pin, settle_data
from support.trainer.hub import Hub
from support.trainer.tiny_model import make_tiny_tokenizer

OLD, NEW = "1" * 40, "2" * 40


def _commit(texts):
    return {"README.md": b"", "train.jsonl": "".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one dataset, `org/rows`, that has two commits."""
    with Hub("datasets/org/rows", {OLD: _commit("abc"), NEW: _commit("xy")}).serving() as server:
        for name, value in {
            "datasets.config.HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "datasets.config.HF_DATASETS_CACHE": tmp_path / "datasets",
            "datasets.config.HF_HUB_OFFLINE": False,
            "huggingface_hub.constants.HF_HUB_OFFLINE": False,
            "huggingface_hub.constants.HF_HUB_CACHE": str(tmp_path / "hub"),
        }.items():
            monkeypatch.setattr(name, value)
        yield server


def read(saved, *, is_own, revision=None):
    """Return the texts of the rows that a run reads, and their origin."""
    pinned = pin(DatasetConfig(name="org/rows", revision=revision), saved, is_own=is_own)
    source = load_prompts(pinned, make_tiny_tokenizer(), seed=1)
    return "".join(row["prompt"] for row in source.rows), origin_of(pinned, source)


OWN_NAME = b"---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"


@pytest.mark.parametrize("readme", [b"", OWN_NAME], ids=["default", "its only config has a name"])
def test_a_run_reads_the_commit_that_it_began_with(hub, readme, monkeypatch, tmp_path):
    for files in hub.commits.values():
        files["README.md"] = readme
    texts, began = read(None, is_own=False)
    assert (texts, began.commit, began.rows) == ("abc", OLD, 3)
    hub.branch = NEW
    hub.asked.clear()
    assert read(began, is_own=True) == (texts, began)
    assert not (hub.asked and readme == b""), "what is in the cache needs no hub, unless to ask which config it is"
    assert read(began, is_own=False) == (texts, began), "so does a job that goes on from it"
    texts, now = read(began, is_own=False, revision="main")
    assert (texts, now.commit) == ("xy", NEW), "unless it sets a revision"
    assert settle_data("dataset.name", now, began, run="r", is_own=False, step=7).first_step == 7
    with pytest.raises(ConfigError, match=r"dataset.name: cannot load org/rows: Revision '3333"):
        read(None, is_own=False, revision="3" * 40)
    # A hub that does not answer: `datasets` would take the newest commit that it has.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert read(began, is_own=True) == ("abc", began)
    with pytest.raises(ConnectionError, match=rf"dataset.name: .* at commit {'3' * 40}, and the cache has {NEW}"):
        read(None, is_own=False, revision="3" * 40)
    with pytest.raises(ConnectionError, match=r"dataset\.revision: the hub does not say which commit .* is main, and"):
        read(None, is_own=False, revision="main")
    for folder in (tmp_path / "datasets").glob(f"org___rows/*/*/{OLD}"):
        shutil.rmtree(folder)
    assert read(None, is_own=False, revision="main")[0] == "xy", "it can be no other"
