"""Files of JSON lines: readable after each write, and cut back when a run resumes from an earlier step."""

import json
import math

from grpo_workload.reporting.jsonl import StepLog


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = StepLog(path)
    log.write(0, {"loss": 0.5, "kl": math.nan})
    assert read(path) == [{"step": 0, "loss": 0.5, "kl": None}]
    log.write(1, {"loss": 0.25})
    assert read(path)[1] == {"step": 1, "loss": 0.25}
    log.close()


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path)
    for step in range(5):
        log.write(step, {"loss": float(step)})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')

    resumed = StepLog(path, resume_step=3)
    assert [line["step"] for line in read(path)] == [0, 1, 2]
    resumed.write(3, {"loss": 33.0})
    resumed.close()
    assert [line["loss"] for line in read(path)] == [0.0, 1.0, 2.0, 33.0]
