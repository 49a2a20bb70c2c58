"""Findings of an attempt's trials hold for later attempts under the same conditions, and for no others."""

import pytest

from grpo_spec.contract import Contract
from grpo_workload.training import trials
from grpo_workload.training.trials import FILE_NAME, Found, read_trials
from support.trainer.places import contract_json

FOUND = Found(tokens=9000, prompt_tokens=300)


@pytest.fixture(autouse=True)
def _is_the_only_rank(monkeypatch):
    monkeypatch.setattr(trials, "gather", lambda value: [value])
    monkeypatch.setattr(trials, "on_main", lambda action: action())


def contract(*, attempt=0, halvings=0, **config):
    raw = contract_json(config, device="cpu", microBatchHalvings=halvings)
    return Contract.model_validate(raw | {"attempt": attempt})


def test_a_later_attempt_finds_it_and_writes_nothing(tmp_path):
    first = read_trials(contract(), tmp_path / "run")
    assert first.found is None
    first.keep(FOUND)
    written = (tmp_path / "run" / FILE_NAME).stat().st_ino
    later = read_trials(contract(attempt=1), tmp_path / "run")
    assert later.found == FOUND
    assert (later.tokens(300), later.tokens(301)) == (9000, None)
    later.keep(FOUND)
    assert (tmp_path / "run" / FILE_NAME).stat().st_ino == written


@pytest.mark.parametrize(
    "changes", [{"halvings": 1}, {"training": {"maxCompletionLength": 77}}, {"model": {"name": "other"}}]
)
def test_other_settings_are_tried(tmp_path, changes):
    read_trials(contract(), tmp_path).keep(FOUND)
    assert read_trials(contract(attempt=1, **changes), tmp_path).found is None


def test_other_devices_versions_and_sources_are_tried(tmp_path, monkeypatch):
    read_trials(contract(), tmp_path).keep(FOUND)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "loss.py").write_text("pass")
    changes = {
        "gather": lambda value: [value, value],
        "installed": lambda package: "9.9",
        "SOURCES": tmp_path / "sources",
    }
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(trials, name, value)
            assert read_trials(contract(), tmp_path).found is None
    assert read_trials(contract(), tmp_path).found == FOUND


def test_where_it_cannot_be_written_the_attempt_goes_on(tmp_path, caplog):
    (tmp_path / "run").write_text("no folder")
    read_trials(contract(), tmp_path / "run").keep(FOUND)
    assert "not kept for later attempts" in caplog.text


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"tokens": 1, "promptTokens": 2'])
def test_a_damaged_file_is_as_none(tmp_path, content):
    (tmp_path / FILE_NAME).write_text(content)
    assert read_trials(contract(), tmp_path).found is None
