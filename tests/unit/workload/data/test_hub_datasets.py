"""Datasets of the hub are read at the commit that their branch had when the run began: the real client, a small hub."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.origin import DataOrigin, origin_of, pin, settle_data
from support.trainer.tiny_model import make_tiny_tokenizer

OLD, NEW = "1" * 40, "2" * 40


def _rows(texts: str) -> bytes:
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode()


class Hub(ThreadingHTTPServer):
    """A hub with one dataset, `org/rows`, that has two commits; its branch `main` is at `branch`."""

    commits: ClassVar[dict[str, dict[str, bytes]]] = {
        OLD: {"README.md": b"# old", "train.jsonl": _rows("abc")},
        NEW: {"README.md": b"# new", "train.jsonl": _rows("xy")},
    }

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.branch = OLD
        self.asked: list[str] = []
        self.cache = Path()


class Handler(BaseHTTPRequestHandler):
    """Answers like the hub."""

    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing: the test says what was asked."""

    def _answer(self) -> None:
        self.server.asked.append(self.path)
        # datasets/org/rows/resolve/<revision>/<file>, or api/datasets/org/rows/<revision or tree>/<revision>
        parts = self.path.partition("?")[0].strip("/").removeprefix("api/").split("/")
        if parts[:3] != ["datasets", "org", "rows"]:
            self._send(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})
            return
        kind, revision, name = parts[3], parts[4], "/".join(parts[5:])
        commit = self.server.branch if revision == "main" else revision
        if (files := self.server.commits.get(commit)) is None:
            self._send(b"{}", 404, **{"X-Error-Code": "RevisionNotFound"})
        elif kind == "resolve" and name not in files:
            self._send(b"", 404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        elif kind == "resolve":
            self._send(files[name], **{"ETag": f'"{name}-{commit}"', "X-Repo-Commit": commit})
        elif kind == "tree":
            tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": file} for file in files]
            self._send(json.dumps(tree).encode())
        else:
            self._send(json.dumps({"id": "org/rows", "sha": commit, "siblings": []}).encode())

    def _send(self, content: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Hub()
    server.cache = tmp_path / "datasets"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "datasets.config.HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "datasets.config.HF_DATASETS_CACHE": server.cache,
        "datasets.config.HF_HUB_OFFLINE": False,
        "huggingface_hub.constants.HF_HUB_OFFLINE": False,
        "huggingface_hub.constants.HF_HUB_CACHE": str(tmp_path / "hub"),
    }.items():
        monkeypatch.setattr(name, value)
    yield server
    server.shutdown()
    server.server_close()


def read(saved: DataOrigin | None, *, is_own: bool, revision: str | None = None) -> tuple[str, DataOrigin]:
    """Return the texts of the rows that a run reads, and their origin."""
    pinned = pin(DatasetConfig(name="org/rows", revision=revision), saved, is_own=is_own)
    source = load_prompts(pinned, make_tiny_tokenizer(), seed=1)
    return "".join(row["prompt"] for row in source.rows), origin_of(pinned, source)


OWN_NAME = b"---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"


@pytest.mark.parametrize("readme", [b"", OWN_NAME], ids=["default", "its only config has a name"])
def test_a_run_reads_the_commit_that_it_began_with(hub, readme, monkeypatch):
    monkeypatch.setattr(
        hub, "commits", {commit: {**files, "README.md": readme} for commit, files in hub.commits.items()}
    )
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
    for folder in hub.cache.glob(f"org___rows/*/*/{OLD}"):
        shutil.rmtree(folder)
    assert read(None, is_own=False, revision="main")[0] == "xy", "it can be no other"
