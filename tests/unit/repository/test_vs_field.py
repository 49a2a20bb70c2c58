"""Asserts what the table of several trainers measures: lengths by order, steps from first request to first request."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.runs import JobError
from benchmarks.vs_field import profile
from benchmarks.vs_field.clock import VARIABLE, Waves, variables
from benchmarks.vs_field.sides import identity
from benchmarks.vs_field.trainer import WARMUP, as_table, said, summarise

WANTED = [5, 7]


def test_each_wave_has_all_lengths_in_order_and_ends_with_its_last_request() -> None:
    lines: list[dict[str, Any]] = []
    waves = Waves(WANTED, lines.append)
    for step in range(2):
        assert [waves.begins(f"{step}-{place}") for place in range(2)] == WANTED
        waves.ends("a check of weights", 1)
        waves.ends(f"{step}-1", 7)
        assert "end" not in lines[-1]
        waves.ends(f"{step}-0", 5)
    assert [(line["wave"], line.get("tokens")) for line in lines] == [(0, None), (0, 12), (1, None), (1, 12)]


def test_the_engine_is_told_the_lengths_and_the_file(tmp_path: Path) -> None:
    given = variables(tmp_path, WANTED, tmp_path / "waves.jsonl")
    assert json.loads(given[VARIABLE]) == [str(tmp_path / "waves.jsonl"), WANTED, None]
    assert "benchmarks.vs_field.clock:impose" in next(tmp_path.glob("*/entry_points.txt")).read_text()


def _events(tokens: int = 12) -> list[dict[str, Any]]:
    """Steps of 10 s, of which 4 s are samples; two slower ones before; the last has only begun."""
    begins = [0.0, 60.0, 90.0, 100.0, 110.0]
    ends = [{"wave": wave, "end": begin + 4, "tokens": tokens} for wave, begin in enumerate(begins[:-1])]
    return [*({"wave": wave, "begin": begin} for wave, begin in enumerate(begins)), *ends]


def test_measured_steps_are_those_after_the_warmup() -> None:
    assert WARMUP == 2
    found = summarise(_events(), WANTED, "1.5")
    assert found["seconds"] == {"step": [10.0, 10.0], "sampling": [4.0, 4.0]}
    assert found["median"] == {"step": 10.0, "sampling": 4.0, "rest": 6.0}
    assert found["tokens_per_second"] == 1.2


def test_parts_of_steps_are_read_from_a_log() -> None:
    lines = [f"step:{step} - timing_s/gen:{4.0 + step} - timing_s/step:1{step}.5 - perf/mfu:0.1" for step in range(4)]
    assert said("\n".join(lines), 3) == {"gen": 6.0, "step": 12.5}
    assert said("nothing", 3) == {}


def test_kernels_of_a_window_are_counted_once_where_they_overlap() -> None:
    second = 10**9
    events = [
        (0, second, "nvjet_sm90_before"),
        (10 * second, 3 * second, "nvjet_sm90_tst"),
        (11 * second, second, "void cutlass::device_kernel<flash::FlashAttnFwdSm90"),
        (12 * second, 2 * second, "_swiglu_forward_kernel"),
        (20 * second, second, "Memcpy DtoH"),
    ]
    seen = profile.kernels(events, 10 * second, 20 * second)
    assert (seen["seconds"], seen["gpu_seconds"], seen["kernels"]) == (10.0, 4.0, 3)
    assert seen["kinds"] == {"products": 3.0, profile.OTHER: 2.0, "attention": 1.0}
    row = "| ours | rest | 10.00 | 4.00 | 0.00 | 1.00 | 3.00 | 0.00 | 0.00 | 2.00 |"
    assert profile.as_table([{"side": "ours", "profile": {"rest": seen}}, {"side": "trl"}]).splitlines()[2:] == [row]


def test_other_lengths_are_no_result() -> None:
    with pytest.raises(JobError, match=r"steps of \{11\} tokens, not 12"):
        summarise(_events(11), WANTED, "1.5")


def test_a_table_compares_with_ours_of_the_same_lengths() -> None:
    shape = {"lengths": "equal", "size": "1.5", "device": "cuda"}
    ours = {"side": "ours", **shape, **summarise(_events(), WANTED, "1.5")}
    theirs, slow = ({**ours, "side": side, "median": {**ours["median"], "step": 15.0}} for side in ("verl", "ours"))
    failed = {"side": "verl", **shape, "lengths": "lognormal", "error": "0 steps began\nmore"}
    smoke = {**slow, "size": "tiny", "device": "cpu"}
    *_, first, second, third, _, fifth, _ = as_table([ours, theirs, failed, ours, slow, smoke]).splitlines()
    assert [line.split(" | ")[-1] for line in (first, second, fifth)] == ["1.00 |", "1.50 |", "1.50 |"]
    assert "failed: 0 steps began |" in third


def test_a_sides_processes_find_the_clock_wherever_they_run(tmp_path: Path) -> None:
    environ = variables(tmp_path / "plugin", WANTED, tmp_path / "waves.jsonl")
    code = "import benchmarks.vs_field.clock"
    subprocess.run([sys.executable, "-c", code], env=os.environ | environ, cwd=tmp_path, check=True)


def test_a_message_alone_is_the_prompt(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    for name in ("config.json", "chat_template.jinja"):
        (model / name).write_text(name)
    (folder := tmp_path / "folder").mkdir()
    own = identity(model, folder)
    assert (own / "config.json").read_text() == "config.json"
    assert (own / "chat_template.jinja").read_text().count("<|im_start|>") == 0
    assert (model / "chat_template.jinja").read_text() == "chat_template.jinja"
