"""Checkpoints under what storage and clusters do: damage, no space, SIGKILL, and an epoch that should be gone."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from test_train import make_config

from grpo_workload.claim import Claim
from grpo_workload.contract import ExitCode
from grpo_workload.lineage import checkpoints, step_of
from grpo_workload.manifest import faults, read_manifest

PROGRAMS = Path(__file__).parent / "programs"


def test_damage_another_epoch_and_a_limit_on_files(run_program, tiny_model, tmp_path):
    run_program("storage.py", 2, tiny_model, tmp_path, "damaged", "superseded", "superseded_while_saving", "limited")


@pytest.fixture
def small_volume(tmp_path):
    """A volume of 2.2 MB; a checkpoint of the tiny model has more than half of it."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2200k", "tmpfs", folder], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a volume here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_volume_fails_all_ranks_and_harms_no_checkpoint(run_program, tiny_model, small_volume):
    run_program("storage.py", 2, tiny_model, small_volume, "full")


def newest_step(folder):
    return max((step_of(path) for path in checkpoints(folder)), default=0)


def test_a_save_killed_at_any_moment_harms_no_checkpoint(start_ranks, tiny_model, tmp_path):
    folder = tmp_path / "endless" / "checkpoints"
    reached = 0
    for attempt in range(2):
        ranks = start_ranks([str(PROGRAMS / "storage.py"), str(tiny_model), str(tmp_path), "endless"], 2, f"attempt-{attempt}")
        goal = reached + random.randint(2, 5)
        part = random.choice(["deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt", "model/config.json", "manifest.json"])
        scratch = folder / f".epoch-0-step-{goal}" / part
        # A fast save may be over before anyone looks; then the kill comes at whatever moment the next ones are at.
        ranks.until(lambda goal=goal, scratch=scratch: scratch.exists() or newest_step(folder) >= goal)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGKILL)
        ranks.exit_codes()
        found = checkpoints(folder)
        assert step_of(found[0]) >= goal - 1
        for checkpoint in found:
            entries = read_manifest(checkpoint)
            assert faults(checkpoint, entries, entries) == []
        assert step_of(found[0]) > reached
        reached = step_of(found[0])


def test_ranks_of_a_superseded_epoch_end_at_their_next_step_and_write_nothing(start_training, tiny_model, tmp_path):
    run_dir = tmp_path / "data" / "ns" / "job" / "uid"
    metrics = run_dir / "metrics.jsonl"
    config = make_config(tiny_model, max_steps=100_000)
    config["storage"] = {"checkpointEverySteps": 2, "keep": 1}
    ranks = start_training(config, 2)
    ranks.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    Claim.take(run_dir, 1, "uid-of-its-successor")
    assert all(code not in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.CONFIG_ERROR) for code in ranks.exit_codes())
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith("."))
    for rank in range(2):
        message = json.loads((tmp_path / "train-uid" / f"state-{rank}" / "error.json").read_text())["message"]["message"]
        assert "epoch 0 of this job was superseded by epoch 1, claimed by pod uid uid-of-its-successor; nothing was published" in message
    assert len(left) == 1
    steps = len(metrics.read_text().splitlines())
    assert int(left[0].removeprefix("step-")) in (steps, steps - 1)
