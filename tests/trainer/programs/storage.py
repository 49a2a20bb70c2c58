"""Saves and finds checkpoints on a storage that misbehaves, on 2 ranks: storage.py MODEL DATA SCENARIO...

A SCENARIO is the name of a function below, and of its run. Each rank reports what the functions return, by scenario:
steps that were found, errors, and names of the folders of checkpoints.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import resource
import sys
from pathlib import Path

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

environment.prepare(Device.CPU, os.environ)

import torch.distributed as dist
from results import error_of, report
from transformers import AutoTokenizer

from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather
from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.fence import Fence
from support.trainer.step_settings import bare_settings

PAD = 2


class Trainer:
    """A policy that runs of any name save; it is never trained."""

    def __init__(self, model, data):
        config = bare_settings(model, "float32")
        self.policy = Policy(config, Device.CPU, timeout_seconds=60, pad_token_id=PAD)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.data = Path(data)

    def open(self, run, *, keep=2, attempt=0):
        return Checkpoints(self.data, run, keep=keep, attempt=attempt, pod_uid=f"uid-{attempt}")

    def save(self, checkpoints, step, background=None):
        state = SavedState(step=step, weight_version=step, num_tokens=0, world_size=2, zero_stage=2)
        pending = checkpoints.begin(self.policy, self.tokenizer, state, background=background)
        return checkpoints.relative(pending.publish())

    def find(self, checkpoints):
        source = checkpoints.find(None, world_size=2, zero_stage=2)
        return None if source is None else source.state.step

    def names(self, run):
        dist.barrier()
        return gather(sorted(path.name for path in (self.data / run / "checkpoints").iterdir()))[0]


def on_rank(rank, action):
    if dist.get_rank() == rank:
        action()
    dist.barrier()


def damaged(trainer):
    checkpoints = trainer.open("damaged", keep=3)
    folders = [trainer.data / trainer.save(checkpoints, step) for step in (1, 2, 3)]
    shard = folders[2] / "deepspeed" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def flip_a_byte():
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)

    on_rank(0, flip_a_byte)
    on_rank(0, (folders[1] / "manifest.json").unlink)
    result = {"found": trainer.find(trainer.open("damaged", keep=3, attempt=1)), "names": trainer.names("damaged")}
    checkpoints = trainer.open("damaged", keep=3, attempt=2)
    result["found_again"] = trainer.find(checkpoints)
    trainer.save(checkpoints, 2)
    result["names_after_save"] = trainer.names("damaged")

    on_rank(0, lambda: (folders[0] / "trainer.json").write_text("{}"))
    on_rank(0, lambda: (folders[1] / "model" / "model.safetensors").unlink())
    last = trainer.open("damaged", attempt=3)
    return result | {"error": error_of(trainer.find, last), "names_after_error": trainer.names("damaged")}


def superseded(trainer):
    checkpoints = trainer.open("superseded", keep=1, attempt=3)
    checkpoints.check()
    trainer.save(checkpoints, 1)
    on_rank(0, lambda: Fence.take(trainer.data / "superseded", 4, "uid-of-its-successor"))
    return {
        "check": error_of(checkpoints.check),
        "save": error_of(trainer.save, checkpoints, 2),
        "names": trainer.names("superseded"),
        "open": error_of(trainer.open, "superseded", attempt=3),
    }


def superseded_while_saving(trainer):
    checkpoints = trainer.open("superseded_while_saving", attempt=3)
    trainer.save(checkpoints, 1)
    get_weights = trainer.policy.merged_weights  # called after DeepSpeed has saved, before anything is published

    def weights():
        if dist.get_rank() == 0:
            Fence.take(trainer.data / "superseded_while_saving", 4, "uid-4")
        return get_weights()

    trainer.policy.merged_weights = weights
    error = error_of(trainer.save, checkpoints, 2)
    trainer.policy.merged_weights = get_weights
    trainer.open("superseded_while_saving", attempt=5)
    return {"error": error, "names": trainer.names("superseded_while_saving")}


def limited(trainer):
    """Limit the size of one rank's files, as a quota of the folder does, first on rank 1 and then on rank 0."""
    checkpoints = trainer.open("limited", keep=1)
    trainer.save(checkpoints, 1)
    limits = []
    for rank in (1, 0):
        on_rank(rank, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY)))
        error = error_of(trainer.save, checkpoints, 2)
        on_rank(
            rank, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        )
        limits.append({"error": error, "names": trainer.names("limited"), "found": trainer.find(checkpoints)})
    trainer.save(checkpoints, 2)
    return {"limits": limits, "names_without_limit": trainer.names("limited")}


def full(trainer):
    """DATA is a volume that has room for one checkpoint, but not for two."""
    checkpoints = trainer.open("full", keep=1)
    trainer.save(checkpoints, 1)
    error = error_of(trainer.save, checkpoints, 2)
    return {"error": error, "names": trainer.names("full"), "found": trainer.find(checkpoints)}


def endless(trainer):
    """Save until killed, in turn in the background and not."""
    checkpoints = trainer.open("endless", keep=2)
    background = Background(trainer.policy.device)
    background.staging.reserve(checkpoints.num_bytes(trainer.policy))
    step = trainer.find(checkpoints) or 0
    while True:
        step += 1
        trainer.save(checkpoints, step, background if step % 2 else None)
        background.staging.clear()


def main(model, data, *scenarios):
    trainer = Trainer(model, data)
    report({scenario: globals()[scenario](trainer) for scenario in scenarios})


main(*sys.argv[1:])
