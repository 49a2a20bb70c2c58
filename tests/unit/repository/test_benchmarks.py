"""Asserts what a failing or refused benchmark does, that results are of the versions that page and lock say, and that
docs/trust.md says what mutants are killed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from benchmarks.common.runs import about
from benchmarks.generation import ngrams
from benchmarks.training import calculator_kills

from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import plan_topology
from support.paths import ROOT

ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
# Its child starts a session of its own and ends: what it leaves there has no parent that the benchmark knows of.
STARTS_AN_ORPHAN = """
import subprocess, sys, threading
from benchmarks.common.processes import ended_with
orphan = 'import subprocess; print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)'
with ended_with():
    subprocess.run([sys.executable, "-c", orphan], check=True)
    {then}
"""
RUNS = """
import sys
from pathlib import Path
from benchmarks.common.runs import JobError, run_job
try:
    run_job(Path(sys.argv[1]), {spec}, 1, seconds={seconds})
except JobError as error:
    print(error.reason)
"""


@pytest.mark.parametrize("then", ["pass", "raise ValueError", "threading.Event().wait()"])
def test_nothing_outlives_a_benchmark(then: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_AN_ORPHAN.format(then=then)]
    errors = tmp_path / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, env=ENVIRON, text=True, stdout=subprocess.PIPE, stderr=stderr) as benchmark,
    ):
        try:
            assert benchmark.stdout is not None
            orphan = benchmark.stdout.readline()
            assert orphan.strip().isdigit(), (orphan, errors.read_text())
            if "wait" in then:
                benchmark.terminate()
            benchmark.wait(timeout=100)
            assert not psutil.pid_exists(int(orphan)), errors.read_text()
        finally:
            benchmark.kill()  # or leaving the block would wait for it


LEAVES_A_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
WAITS_FOR_A_THREAD = """
import subprocess, sys, time
from benchmarks.common.processes import ended_with
with ended_with():
    started = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=-3, stderr=-3)  # DEVNULL
    while "State:\\tZ" not in open(f"/proc/{started.pid}/status").read():
        time.sleep(0.01)
    print(started.pid)
"""


def test_a_process_whose_first_thread_has_ended_is_ended_too() -> None:
    """So looks one whose threads still free a GPU's memory, which the next run would otherwise lack."""
    command = [sys.executable, "-c", WAITS_FOR_A_THREAD, LEAVES_A_THREAD]
    done = subprocess.run(command, env=ENVIRON, text=True, capture_output=True, check=True, timeout=300)
    assert not psutil.pid_exists(int(done.stdout))


@pytest.mark.parametrize(
    ("spec", "seconds", "reason"),
    [
        ({"model": {}}, 300, "the job ended with 2 after 0 of 1 steps\nError: .*job.yaml: job bench: spec"),
        ({"model": {}}, 0, "0 of 1 steps after 0 s"),
    ],
    ids=["refused", "late"],
)
def test_a_job_that_fails_says_why(tmp_path: Path, spec: dict[str, object], seconds: float, reason: str) -> None:
    code = RUNS.format(spec=spec, seconds=seconds)
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, env=ENVIRON, text=True, capture_output=True, check=True, timeout=300)
    assert re.search(reason, done.stdout), done.stdout


@pytest.mark.parametrize(
    ("option", "value"), [("--shape", "colocate:3"), ("--shape", "server:4+1"), ("--completions", "60")]
)
def test_work_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path, option: str, value: str) -> None:
    command = [sys.executable, "-m", "benchmarks.generation.topologies", "--gpus", "4", "--shape", "colocate:1"]
    command += [option, value]
    done = subprocess.run(command, env=ENVIRON, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=300)
    assert done.returncode == 2
    assert f"{option} {value}: use" in done.stderr
    assert not list(tmp_path.iterdir())


SHOWN = ("vllm", "torch", "transformers", "deepspeed", "trl")


def _versions(results: Path) -> dict[str, str]:
    """Versions that every run of a file of results states. A run that states another one fails."""
    text = results.read_text()
    runs = [json.loads(text)] if results.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    stated = {pair for run in runs for pair in run.get("versions", run).items() if pair[0] in SHOWN}
    assert len(stated) == len(dict(stated)), f"{results.name} mixes versions: {sorted(stated)}"
    return dict(stated)


def test_the_page_says_which_versions_each_figure_is_of() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    for results in sorted((ROOT / "benchmarks/results").glob("*.json*")):
        versions = _versions(results)
        if versions:
            assert f"| `{results.name}` | {' | '.join(versions.get(name, '') for name in SHOWN)} |" in page
        assert versions or not re.search("h[12]00", results.name), results.name


def test_a_result_says_the_command_as_the_script_takes_it() -> None:
    assert about("benchmarks.a", micro_batches=4)["command"] == "python -m benchmarks.a --micro-batches 4"
    for results in (ROOT / "benchmarks/results").glob("*.jsonl"):
        assert not re.search(r"python -m benchmarks[^\"]* --[a-z]+_", results.read_text()), results.name


def test_ranks_that_do_not_end_in_time_are_said_to_be_late_whatever_they_have_written(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import sys, time\nprint('a warning', file=sys.stderr, flush=True)\ntime.sleep(600)\n"
    )
    start = "import sys, pathlib; from benchmarks.common.processes import run_ranks; "
    code = f"{start} print(run_ranks('slow', 1, [], pathlib.Path(sys.argv[1]), 3))"
    environ = ENVIRON | {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRON["PYTHONPATH"]])}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environ, text=True, capture_output=True, check=True
    )
    assert done.stdout == "a warning\nno end after 3 s\n"


def test_the_gpu_lock_has_the_versions_of_the_newest_figures() -> None:
    lock = dict(re.findall(r"^([a-z]+)==(\S+)", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE))
    newest = f"*_vllm{lock['vllm'].removesuffix('.0').replace('.', '')}.jsonl"
    folder = ROOT / "benchmarks/results"
    found = {one.name: _versions(one) for one in (folder / "train_families_h100.jsonl", *folder.glob(newest))}
    assert {name.split("_")[0] for name in found} == {"train", "trainer", "staleness", "topologies"}, found
    for versions in found.values():
        assert {name: lock.get(name, version) for name, version in versions.items()} == versions


def test_the_page_says_what_share_of_mutants_the_tests_kill() -> None:
    """By room; a mutant that survived is named, or judged to be no fault."""
    lines = (ROOT / "benchmarks" / "results" / "mutants.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    page = (ROOT / "docs" / "trust.md").read_text().partition("## How many faults do the unit tests catch?")[2]
    said = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+)% \|$", page, re.MULTILINE)
    expected = []
    for room in sorted({row["room"] for row in rows}):
        own = [row for row in rows if row["room"] == room]
        killed = sum(row["result"] != "survived" for row in own)
        alike = sum("no_fault" in row for row in own)
        expected.append((room, *map(str, (len(own), killed, alike, round(100 * killed / (len(own) - alike))))))
    assert said == expected
    for row in rows:
        assert (row["result"] == "survived") or "no_fault" not in row
        if row["result"] == "survived" and "no_fault" not in row:
            assert f"`{row['module'].rpartition('.')[2]}.py` line {row['line']}" in page


def test_the_calculator_whose_pods_are_killed_is_the_example_with_pods_that_begin_again() -> None:
    made = calculator_kills.spec(Path("model"), seed=3, steps=16, prompts=4, problems=48)
    *_, example = yaml.safe_load_all((calculator_kills.EXAMPLE / "job.yaml").read_text())
    for part in ("dataset", "tools", "rewards"):
        assert made[part] == example["spec"][part]
    job = Job(namespace="n", name="j", uid="u", generation=1, spec=parse_spec(made))
    contract = make_contract(job, topology := plan_topology(job), 0)
    assert contract.restart_engines
    assert [group.name for group in topology.environment_groups] == ["calculators"]
    assert contract.config.training.max_steps == contract.config.evaluation.every_steps == 16


def test_drafts_by_n_grams_are_accepted_as_far_as_the_sampled_text_goes() -> None:
    repeats, once = [1, 2, 3, 4] * 4, list(range(50, 66))
    # A pass yields two drafted tokens and one of the model.
    assert ngrams.replay(repeats, repeats, 2) == ngrams.Passes(tokens=16, passes=6)
    assert ngrams.replay(repeats, once, 2) == ngrams.Passes(tokens=16, passes=16)
    assert ngrams.replay(repeats, [*once, *repeats], 2, begin=16).tokens == 16
    # Ten passes; in the last six at most one completion runs, and each yields two tokens: 7 of 10 are left.
    assert ngrams.speedup([4, 10], 1, 2.0, share=1.0) == pytest.approx(10 / 7)
    assert ngrams.speedup([4, 10], 1, 2.0, share=0.5) == pytest.approx(1 / 0.85)
