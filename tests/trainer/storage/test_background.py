"""Checkpoints that are written while training goes on hold what was copied, and fail as those that training waits for.
Each rank writes a part of the model, and rank 0 alone reads the one that a run begins with under ZeRO-3.

Ranks of a real job that are stopped or killed while they save: tests/trainer/training/test_train.py, test_storage.py.
"""

import re

import torch
from transformers import AutoTokenizer

from support.families import make_model
from support.trainer.program_errors import assert_error


def test_copies_failures_a_newer_attempt_and_a_lack_of_memory(run_program, tiny_model, tmp_path):
    """Each is the same on both ranks, and no failure harms the older checkpoint."""
    experts = make_model("deepseek_v3", vocab_size=259)
    for name, buffer in experts.named_buffers():
        if "e_score" in name:
            buffer.copy_(torch.randn(buffer.shape))
    experts.save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "experts")
    scenarios = ("loaded", "copies", "limited", "superseded", "ended", "lacking")
    results = run_program("background.py", 2, tiny_model, tmp_path, *scenarios)
    for rank, result in enumerate(results):
        check_loaded(result["loaded"], rank, experts.config.num_hidden_layers)
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


def check_loaded(loaded, rank, layers):
    assert loaded["same"], "weights are those of the checkpoint, bit for bit"
    assert loaded["buffers"]
    assert all(loaded["buffers"]), "also those that each rank has whole"
    assert loaded["parts"] == layers + 1, "a layer at a time, and what is in none"
    assert loaded["dims"] == ([1, 2] if rank == 0 else [1]), "no matrix has values but on rank 0"


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
