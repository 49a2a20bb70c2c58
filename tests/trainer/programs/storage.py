"""Saves and finds checkpoints on a storage that misbehaves, on 2 ranks: storage.py MODEL DATA SCENARIO...

A SCENARIO is the name of a function below, and of its run. Each rank reports what the functions return, by scenario:
steps that were found, errors, and names of the folders of checkpoints.
"""

import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fixed_samples import make_policy, take_step
from results import error_of, report
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.ranks.collectives import gather
from grpo_workload.storage import model_files, staging
from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.manifest import read_manifest
from support.trainer.step_settings import step_settings

model_files.FILE_BYTES = 100_000  # so that each rank has files of the model to write


class Trainer:
    """A policy that runs of any name save, and its thread for that."""

    def __init__(self, model, data, dtype="float32", stage=2, **sections):
        self.config = step_settings(model, dtype, stage, **sections)
        self.policy = make_policy(self.config)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model, self.data = model, Path(data)
        self.background = Background(self.policy.device)

    def open(self, run, *, keep=1, attempt=0):
        return Checkpoints(self.data, run, keep=keep, attempt=attempt, pod_uid=f"uid-{attempt}")

    def begin(self, checkpoints, step, background=None):
        state = SavedState(step=step, weight_version=step, num_tokens=0, world_size=2, zero_stage=2)
        return checkpoints.begin(self.policy, self.tokenizer, state, background=background)

    def save(self, checkpoints, step, background=None):
        return self.data / checkpoints.relative(self.begin(checkpoints, step, background).publish())

    def hold(self, checkpoints, step):
        """Begin to save; nothing is written before the event is set that this returns, too."""
        go = threading.Event()
        self.background.thread.submit(go.wait)
        return self.begin(checkpoints, step, self.background), go

    def reserve(self, checkpoints):
        return self.background.staging.reserve(checkpoints.num_bytes(self.policy))

    def find(self, checkpoints):
        source = checkpoints.find(None, world_size=2, zero_stage=2)
        return None if source is None else source.state.step

    def names(self, run):
        self.background.thread.submit(int).result()  # the thread has deleted what is no longer kept
        dist.barrier()
        return gather(sorted(path.name for path in (self.data / run / "checkpoints").iterdir()))[0]

    def spoil(self):
        """Overwrite all weights and states in place, as training does."""
        optimizer = adam(self.policy.deepspeed_engine)
        moments = [value for state in optimizer.state.values() for value in state.values()]
        masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        reference = self.policy.following_reference
        weights = [*self.policy.module.parameters(), *(reference.model.parameters() if reference else ())]
        for tensor in (*optimizer.state, *moments, *masters, *weights):
            for part in (tensor, getattr(tensor, "ds_tensor", None)):
                if isinstance(part, torch.Tensor):
                    part.data.fill_(7)


def on_rank(rank, action):
    if dist.get_rank() == rank:
        action()
    dist.barrier()


def damaged(trainer):
    checkpoints = trainer.open("damaged", keep=3)
    folders = [trainer.save(checkpoints, step) for step in (1, 2, 3)]
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
    on_rank(0, lambda: min((folders[1] / "model").glob("*.safetensors")).unlink())
    last = trainer.open("damaged", attempt=3)
    return result | {"error": error_of(trainer.find, last), "names_after_error": trainer.names("damaged")}


def superseded(trainer):
    checkpoints = trainer.open("superseded", attempt=3)
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


def superseded_in_background(trainer):
    checkpoints = trainer.open("superseded_in_background", attempt=3)
    trainer.save(checkpoints, 1)
    trainer.reserve(checkpoints)
    pending, go = trainer.hold(checkpoints, 2)
    newer = trainer.open("superseded_in_background", attempt=4)
    go.set()
    error = error_of(pending.publish)
    newer.check()
    return {"error": error, "names": trainer.names("superseded_in_background")}


def limited(trainer):
    """Limit the size of one rank's files, as a quota of the folder does, on rank 1, rank 0 and rank 1's thread."""
    checkpoints = trainer.open("limited")
    trainer.save(checkpoints, 1)
    trainer.reserve(checkpoints)
    limits = []
    for rank, background in ((1, None), (0, None), (1, trainer.background)):
        on_rank(rank, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY)))
        error = error_of(trainer.save, checkpoints, 2, background)
        on_rank(
            rank, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        )
        limits.append({"error": error, "names": trainer.names("limited"), "found": trainer.find(checkpoints)})
    names = []
    for step, background in ((2, None), (3, trainer.background)):
        trainer.save(checkpoints, step, background)
        names.append(trainer.names("limited"))
    return {"limits": limits, "names_without_limit": names}


def full(trainer):
    """DATA is a volume that has room for one checkpoint, but not for two."""
    checkpoints = trainer.open("full")
    trainer.save(checkpoints, 1)
    error = error_of(trainer.save, checkpoints, 2)
    return {"error": error, "names": trainer.names("full"), "found": trainer.find(checkpoints)}


def endless(trainer):
    """Save until killed, in turn in the background and not."""
    checkpoints = trainer.open("endless", keep=2)
    trainer.reserve(checkpoints)
    step = trainer.find(checkpoints) or 0
    while True:
        step += 1
        trainer.save(checkpoints, step, trainer.background if step % 2 else None)
        trainer.background.staging.clear()


def ended(trainer):
    """End the thread before a checkpoint is written, as a rank that fails does; then resume."""
    checkpoints = trainer.open("ended")
    trainer.save(checkpoints, 1)
    trainer.reserve(checkpoints)
    _, go = trainer.hold(checkpoints, 2)
    trainer.background.has_ended = True
    go.set()
    trainer.background.end()
    trainer.background = Background(trainer.policy.device)
    return {"found": trainer.find(trainer.open("ended", attempt=1)), "names": trainer.names("ended")}


def lacking(trainer):
    """Let the pod of rank 1 have too little memory."""
    trainer.background = Background(trainer.policy.device)
    checkpoints, usual = trainer.open("lacking"), vars(staging)["free_memory"]
    size = checkpoints.num_bytes(trainer.policy)
    on_rank(1, lambda: vars(staging).update(free_memory=lambda: size))
    message = trainer.reserve(checkpoints)
    vars(staging)["free_memory"] = usual
    return {"message": message, "is_reserved": trainer.background.staging.is_reserved}


COPIED: dict[str, dict[str, Any]] = {
    "plain": {"stage": 0, "dtype": "float32"},
    "half": {"stage": 1},
    "zero2": {},
    "zero3": {"stage": 3},
    "lora": {"stage": 3, "lora": {"r": 4}},
    "away": {"parallelism": {"offloadOptimizer": "generating"}},
    "cpu": {"parallelism": {"offloadOptimizer": "cpu"}},
    "reference": {"stage": 3, "training": {"beta": 0.1, "syncRefModel": True, "refModelSyncSteps": 1}},
}


def copies(trainer):
    """Return for several settings which files differ from those of a save for which training waits."""
    made = {name: {"dtype": "bfloat16"} | fields for name, fields in COPIED.items()}
    return {name: copy(Trainer(trainer.model, trainer.data, **fields), name) for name, fields in made.items()}


def copy(trainer, run):
    take_step(trainer.policy, 0, trainer.config.training)
    checkpoints = trainer.open(run)
    expected = read_manifest(trainer.save(checkpoints, 1))
    lacking = trainer.reserve(checkpoints)
    weights = {name: weight.clone() for name, weight in trainer.policy.merged_weights()}
    pending, go = trainer.hold(checkpoints, 2)
    is_written = pending.is_written
    memory, used = trainer.background.staging._memory, trainer.background.staging._used
    assert memory is not None
    reserved = memory.result().bytes.nbytes
    trainer.spoil()
    go.set()
    published = pending.publish()
    found = read_manifest(published)
    names = trainer.names(run)
    trainer.background.end()
    return {
        "files": sorted(file for file in expected.keys() | found.keys() if expected.get(file) != found.get(file)),
        "lacking": lacking,
        "is_written": is_written,
        "is_measured": used <= reserved <= used + 512,
        "names": names,
        "own": [file for file in pending.writer.entries if file.endswith(".safetensors")],
        "same": trainer.config.lora is not None or same(weights, published / "model"),
    }


def same(weights, folder):
    """Return whether a folder's files hold these weights, bit for bit."""
    saved = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], weight) for name, weight in weights.items())


def main(model, data, *scenarios):
    trainer = Trainer(model, data)
    report({scenario: globals()[scenario](trainer) for scenario in scenarios})


main(*sys.argv[1:])
