"""Checkpoints that are written while training goes on hold what was copied, and fail as those that training waits for.
Each rank writes a part of the model.

Ranks of a real job that are stopped or killed while they save: tests/trainer/training/test_train.py, test_storage.py.
"""

import re

from support.trainer.program_errors import assert_error


def test_copies_failures_a_newer_attempt_and_a_lack_of_memory(run_program, tiny_model, tmp_path):
    """Each is the same on both ranks, and no failure harms the older checkpoint."""
    scenarios = ("copies", "limited", "superseded", "ended", "lacking")
    results = run_program("background.py", 2, tiny_model, tmp_path, *scenarios)
    for result in results:
        for name, copied in result["copies"].items():
            # Byte for byte, although weights and states were overwritten before a byte of the copy was written.
            assert copied["files"] == ["trainer.json"], f"{name}: only the step differs"
            assert copied["is_measured"], f"{name}: the memory is as large as the copy"
            assert not copied["is_written"]
            assert copied["lacking"] is None
            assert copied["names"] == ["step-2"]
            assert copied["same"], f"{name}: weights differ from those of the step"
            assert copied["own"] or name == "lora", f"{name}: each rank writes files of the model"
        check_failures(result["limited"], result["superseded"])
        assert result["ended"] == {"found": 1, "names": ["step-1"]}, (
            "the older checkpoint is valid, the rest is removed"
        )
        assert not result["lacking"]["is_reserved"], "on no rank, since all have to wait for one"
        assert re.fullmatch(
            r"on \S+, copies of 2 ranks take [\d,]+ bytes, and [\d,]+ bytes of memory are free",
            result["lacking"]["message"],
        )


def check_failures(limited, superseded):
    assert_error(
        limited["error"],
        "StorageError",
        r"^storage.claimName: .*zero_pp_rank_1_mp_rank_00_optim_states.pt: .*File too large. It needs about .*step-1",
    )
    assert limited["names"] == ["step-1"]
    assert limited["names_without_limit"] == ["step-2"], "the next save succeeds"
    assert_error(superseded["error"], "SupersededError", r"superseded by attempt 1, held by pod uid uid-1")
    assert superseded["names"] == ["step-1"]
