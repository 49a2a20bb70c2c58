"""Real trackers (TensorBoard, MLflow's file store, Weights & Biases offline, Trackio): restarts, refusals, failures."""

import json
import logging
import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import wandb
from accelerate import PartialState, tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from grpo_devcluster.progress import wait_until
from grpo_spec.contract import JobRef
from grpo_spec.trainer import TrainerConfig
from grpo_workload.reporting.progress_files import read_progress
from grpo_workload.reporting.run_report import RunReport
from grpo_workload.reporting.trackers import GLOBAL_STEP, QUIET, Trackers
from support.trainer.places import CONFIG

STEP = {"reward": 0.5, "step_time": 1.0, "tokens_per_second": 2.0}
JOB = JobRef(namespace="ns", name="arithmetic", uid="6f0c")


@pytest.fixture(autouse=True)
def no_trackers_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("WANDB", "MLFLOW", "TRACKIO"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "TRACKIO_DIR"):  # Trackers set them
        monkeypatch.setenv(name, "")  # undone after the test
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    PartialState(cpu=True)  # ranks have one when they start trackers
    yield
    wandb.teardown()  # it would keep the variables of the first test
    PartialState._reset_state()


def _trackers(folder: Path, *names: str, **training: object) -> Trackers:
    section = {"reportTo": names, "learningRate": 2e-6, **training}
    return Trackers(TrainerConfig.model_validate(CONFIG | {"training": section}), JOB, folder)


def _steps(folder: Path, trackers: Trackers, steps: range) -> None:
    """Report these steps as the loop does."""
    run_dir = folder / JOB.run
    trackers.start(steps.start)
    report = RunReport(run_dir, folder, total_steps=20, step=steps.start, trackers=trackers)
    for step in steps:
        metrics = STEP | {"reward": step / 10, "rewards/accuracy/mean": 0.5, "grad_norm": float("nan")}
        report.step(step, metrics, [], [])
    report.close()


def test_tensorboard_continues_after_a_restart(tmp_path: Path) -> None:
    _steps(tmp_path, _trackers(tmp_path, "tensorboard"), range(5))
    _steps(tmp_path, _trackers(tmp_path, "tensorboard"), range(3, 6))  # from a checkpoint after 3 steps
    events = EventAccumulator(str(tmp_path / JOB.run / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("reward")] == [
        (n + 1, n / 10) for n in range(6)
    ]
    assert "rewards/accuracy/mean" in events.Tags()["scalars"]
    assert "grad_norm" not in events.Tags()["scalars"]
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"learningRate": 2e-06' in config


def test_mlflow_continues_the_same_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    _steps(tmp_path, _trackers(tmp_path, "mlflow", project="sums", runName="first"), range(3))
    _steps(tmp_path, _trackers(tmp_path, "mlflow", project="sums", runName="first", learningRate=1e-6), range(3, 5))
    client = MlflowClient((tmp_path / JOB.run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["training.learningRate"] == "2e-06"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward")] == [
        (n + 1, n / 10) for n in range(5)
    ]


def test_trackio_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACKIO_DIR")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the variable once; TRL, in other tests, loads it
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for steps in (range(3), range(2, 5)):
        _steps(tmp_path, _trackers(tmp_path, "trackio", project="sums", runName="first"), steps)
    with closing(sqlite3.connect(tmp_path / JOB.run / "trackio" / "sums.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs")
    assert {name for name, *_ in rows} == {"first-6f0c"}
    found = [(step, json.loads(metrics)["reward"]) for _, step, metrics in rows]
    assert found == [(n + 1, n / 10) for n in (0, 1, 2, 2, 3, 4)]
    assert json.loads(config)["training.learningRate"] == 2e-6


def _wandb_records(file: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Read LevelDB's log format: a header of 7 bytes, then blocks of 32 KiB with pieces of records.

    Each piece follows its checksum, length and kind.
    """
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # still being written
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb_offline_continues_the_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (range(2), range(1, 3)):
        _steps(tmp_path, _trackers(tmp_path, "wandb", project="sums"), steps)
        # W&B names its folders by the second. Real pods restart more slowly than this test does.
        (tmp_path / JOB.run / "wandb").rename(tmp_path / f"wandb-{steps.start}")
    expected = {("6f0c", "sums", "arithmetic")}, [(1, 0.0), (2, 0.1), (2, 0.1), (3, 0.2)]
    try:  # another process writes the files, and may do so after it was asked to end
        wait_until(lambda: _wandb_runs(tmp_path) == expected, "the records of both attempts", 60)
    except TimeoutError:
        assert _wandb_runs(tmp_path) == expected


def _wandb_runs(folder: Path) -> tuple[set[tuple[str, str, str]], list[tuple[int, float]]]:
    """Return the id, project and name of the runs, and the reward of each step, over all attempts."""
    lines: list[dict[str, str]] = []
    runs = set()
    for file in sorted(folder.glob("wandb-*/offline-run-*/*.wandb")):
        for record in _wandb_records(file):
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.HasField("history"):
                lines.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
    return runs, sorted((int(line[GLOBAL_STEP]), float(line["reward"])) for line in lines)


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [name for name in tracking.get_available_trackers() if str(name) != "wandb"]
    monkeypatch.setattr(tracking, "_available_trackers", installed)
    said = r"^training\.reportTo: wandb is not installed in the image; add the package wandb to it"
    with pytest.raises(ValueError, match=said):
        _trackers(tmp_path, "tensorboard", "wandb")


def test_a_tracker_without_a_login_is_refused_with_a_remedy(tmp_path: Path) -> None:
    said = r"^training\.reportTo: wandb cannot start: .*; set WANDB_API_KEY .*, or leave it out$"
    with pytest.raises(ValueError, match=said):
        _trackers(tmp_path, "wandb").start(0)


def test_a_server_that_does_not_answer_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"^training\.reportTo: mlflow cannot start: .*; set MLFLOW_TRACKING_URI "):
        _trackers(tmp_path, "mlflow").start(0)


def test_a_tracker_that_fails_is_logged_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = _trackers(tmp_path, "mlflow", "tensorboard")
    trackers.start(0)
    shutil.rmtree(tmp_path / JOB.run / "mlruns")
    with caplog.at_level(logging.ERROR, logger="grpo_workload.reporting.trackers"):
        _report_until_failure(tmp_path, trackers)
    failures = [record.getMessage() for record in caplog.records if "TRACKER FAILED" in record.getMessage()]
    assert len(failures) == 1
    assert failures[0].startswith("TRACKER FAILED: mlflow gets no more metrics, training goes on: ")
    progress = read_progress(tmp_path)
    assert progress is not None
    assert progress.metrics["trackers/mlflow/failed"] == 1.0
    assert "trackers/tensorboard/failed" not in progress.metrics
    events = EventAccumulator(str(tmp_path / JOB.run / "tensorboard")).Reload()
    assert len(events.Scalars("reward")) == progress.step


def _report_until_failure(folder: Path, trackers: Trackers) -> None:
    """Report steps until a failure is known, and one more."""
    report = RunReport(folder / JOB.run, folder, total_steps=1000, step=0, trackers=trackers)
    step = 0
    while not trackers.failed:
        report.step(step, STEP, [], [])
        step += 1
        assert step < 1000, "MLflow's store is gone, and its tracker has not failed"
    report.step(step, STEP, [], [])
    report.close()
