"""No checkpoint is harmed by damage, a full volume, SIGKILL or a superseded attempt, and ranks report each of them."""

import os
import random
import re
import signal
import subprocess

import pytest

from grpo_spec.reports import ExitCode
from grpo_workload.storage.checkpoint_folder import checkpoints, step_of
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.manifest import faults, read_manifest
from support.paths import PROGRAMS
from support.trainer.program_errors import assert_error
from support.trainer.trainings import lines_of, make_config

SCENARIOS = ("damaged", "superseded", "superseded_while_saving", "superseded_in_background", "limited", "ended")
MORE = ("lacking", "copies")


def test_damage_another_attempt_a_limit_on_files_and_copies_that_are_written_meanwhile(
    run_program, tiny_model, tmp_path
):
    """Each rank finds the newest whole checkpoint, or fails with a message that says why, and no failure harms one."""
    for result in run_program("storage.py", 2, tiny_model, tmp_path, *SCENARIOS, *MORE):
        check_damaged(result["damaged"])
        check_superseded(*(result[name] for name in SCENARIOS[1:4]))
        check_limited(result["limited"])
        assert result["ended"] == {"found": 1, "names": ["step-1"]}, "the older checkpoint stays, the rest is removed"
        check_lacking(result["lacking"])
        check_copies(result["copies"])


def check_damaged(result):
    """Check what is found when step 2 has no manifest and step 3 a wrong byte, and when all checkpoints are damaged."""
    assert result["found"] == 1, "the newest whole checkpoint is used"
    assert result["names"] == ["damaged-step-2", "damaged-step-3", "step-1"], "damaged ones are renamed"
    assert result["found_again"] == 1
    assert result["names_after_save"] == ["step-1", "step-2"], "a new checkpoint replaces the damaged ones"
    assert_error(
        result["error"],
        "ConfigError",
        r"none .* is whole: \S*step-2 \(model/model-00001-\S+: cannot be read.*step-1 \(trainer.json: has 2",
    )
    assert result["names_after_error"] == ["step-1", "step-2"], "not renamed: the next attempt must not begin at step 0"


def check_superseded(result, *while_saving):
    """Check that attempt 3 publishes nothing after attempt 4 took the fence, between two saves or during one."""
    for call in ("check", "save"):
        assert_error(
            result[call],
            "SupersededError",
            r"attempt 3 .* superseded by attempt 4, held by pod uid uid-of-its-successor; nothing was",
        )
    assert result["names"] == ["step-1"], "a superseded attempt publishes nothing"
    assert_error(result["open"], "SupersededError", "")
    for one in while_saving:
        assert_error(one["error"], "SupersededError", r"superseded by attempt 4, held by pod uid uid-4")
        assert one["names"] == ["step-1"], "what was written is not published"


def check_limited(result):
    """Check saves while files of rank 1, of rank 0 and of rank 1's thread may not exceed 30,000 bytes, and others."""
    of_rank_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    files = (of_rank_1, "mp_rank_00_model_states.pt", of_rank_1)
    for file, limit in zip(files, result["limits"], strict=True):
        assert_error(
            limit["error"],
            "StorageError",
            rf"^storage.claimName: .*{file}: .*File too large. It needs about [\d,]+ bytes.*step-1",
        )
        assert (limit["names"], limit["found"]) == (["step-1"], 1), "the older checkpoint stays"
    assert result["names_without_limit"] == [["step-2"], ["step-3"]], "the next saves succeed"


def check_lacking(result):
    assert not result["is_reserved"], "on no rank, since all have to wait for one"
    lacks = r"on \S+, copies of 2 ranks take [\d,]+ bytes, and [\d,]+ bytes of memory are free"
    assert re.fullmatch(lacks, result["message"])


def check_copies(result):
    """Check what is written of weights and states that are overwritten before the first byte of their copy is."""
    for name, copied in result.items():
        assert copied["files"] == ["trainer.json"], f"{name}: only the step differs"
        assert copied["is_measured"], f"{name}: the memory is as large as the copy"
        assert not copied["is_written"]
        assert copied["lacking"] is None
        assert copied["names"] == ["step-2"]
        assert copied["same"], f"{name}: weights differ from those of the step"
        assert copied["own"] or name == "lora", f"{name}: each rank writes files of the model"


@pytest.fixture
def small_volume(tmp_path):
    """A volume of 2.2 MB; a checkpoint of the tiny model takes more than half of it."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2200k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a volume is not allowed here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_volume_fails_all_ranks_and_harms_no_checkpoint(run_program, tiny_model, small_volume):
    """Each rank's second save fails for lack of space, and the first checkpoint stays."""
    for result in run_program("storage.py", 2, tiny_model, small_volume, "full"):
        assert_error(
            result["full"]["error"],
            "StorageError",
            r"^storage.claimName: .*No space left on device.*needs about [\d,]+ bytes.*[\d,]+ are free.*step-1",
        )
        assert (result["full"]["names"], result["full"]["found"]) == (["step-1"], 1)


def newest_step(folder):
    return max((step_of(path) for path in checkpoints(folder)), default=0)


def test_a_save_killed_at_any_moment_harms_no_checkpoint(start_ranks, tiny_model, tmp_path):
    folder = tmp_path / "endless" / "checkpoints"
    reached = 0
    for attempt in range(2):
        ranks = start_ranks(
            [str(PROGRAMS / "storage.py"), str(tiny_model), str(tmp_path), "endless"], 2, f"attempt-{attempt}"
        )
        goal = reached + random.randint(2, 5)
        part = random.choice(
            ["deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt", "model/config.json", "manifest.json"]
        )
        scratch = folder / f".attempt-0-step-{goal}" / part
        # A fast save may end before this loop sees it; then the kill hits a later save at a random moment.
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


def test_ranks_of_a_superseded_attempt_end_at_their_next_step_and_write_nothing(start_training, tiny_model, tmp_path):
    run_dir = tmp_path / "data" / "ns" / "job" / "uid"
    metrics = run_dir / "metrics.jsonl"
    config = make_config(tiny_model, max_steps=100_000)
    config["storage"] = {"checkpointEverySteps": 2, "keep": 1}
    ranks = start_training(config, 2)
    ranks.until(lambda: metrics.exists() and '"time/write"' in metrics.read_text())  # one was written meanwhile
    assert any(line.get("time/save", 0) > 0 for line in lines_of(metrics))
    Fence.take(run_dir, 1, "uid-of-its-successor")
    assert all(code not in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.CONFIG_ERROR) for code in ranks.exit_codes())
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith("."))
    for rank in range(2):
        said = "attempt 0 of this job was superseded by attempt 1, held by pod uid uid-of-its-successor; nothing was"
        assert said in ranks.error(rank)
    assert len(left) == 1
    steps = len(lines_of(metrics))
    # A save publishes the one before it first, so at most the last one is missing.
    assert steps - 3 <= int(left[0].removeprefix("step-")) <= steps
