"""Checkpoints that are written while training goes on, on 2 ranks: background.py MODEL DATA SCENARIO...

A SCENARIO is the name of a function below, and of its run. Each rank reports what the functions return, by scenario.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

environment.prepare(Device.CPU, os.environ)

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from fixed_samples import PAD, take_step
from results import error_of, report
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather, join
from grpo_workload.storage import model_files, staging
from grpo_workload.storage.background import Background
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.fence import Fence
from grpo_workload.storage.manifest import read_manifest
from support.trainer.step_settings import bare_settings

model_files.FILE_BYTES = 100_000  # so that each rank has files of the model to write
STATE = SavedState(step=1, weight_version=1, num_tokens=0, world_size=2, zero_stage=2)


class Trainer:
    """A policy, its checkpoints, and the thread that writes them."""

    def __init__(self, model, data, run, *, stage=2, dtype="bfloat16", lora=False, offload="none", training=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.config = bare_settings(
            model,
            dtype,
            training={"perDeviceTrainBatchSize": 4, "importanceSamplingCorrection": "none", **(training or {})},
            parallelism={"zeroStage": stage, "offloadOptimizer": offload},
            lora={"r": 4} if lora else None,
        )
        self.policy = Policy(self.config, Device.CPU, timeout_seconds=60, pad_token_id=PAD)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.data, self.run = Path(data), run
        self.checkpoints = self.open(0)
        self.background = Background(self.policy.device)

    def open(self, attempt):
        return Checkpoints(self.data, self.run, keep=1, attempt=attempt, pod_uid=f"uid-{attempt}")

    def save(self):
        return self.data / self.checkpoints.save(self.policy, self.tokenizer, STATE)

    def reserve(self):
        return self.background.staging.reserve(self.checkpoints.num_bytes(self.policy))

    def begin(self, step=2):
        """Begin to save the same state as another step's; nothing is written before `go` is set."""
        go = threading.Event()
        self.background.thread.submit(go.wait)
        state = SavedState(**{name: getattr(STATE, name) for name in STATE.__slots__} | {"step": step})
        pending = self.checkpoints.begin(self.policy, self.tokenizer, state, background=self.background)
        return pending, go

    def names(self):
        dist.barrier()
        return gather(sorted(path.name for path in (self.data / self.run / "checkpoints").iterdir()))[0]

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


def copies(model, data):
    """Return for several settings which files differ from those of a save for which training waits."""
    different = {}
    settings: dict[str, dict[str, Any]] = {
        "plain": {"stage": 0, "dtype": "float32"},
        "half": {"stage": 1},
        "zero2": {},
        "zero3": {"stage": 3},
        "lora": {"stage": 3, "lora": True},
        "away": {"offload": "generating"},
        "cpu": {"offload": "cpu"},
        "reference": {"stage": 3, "training": {"beta": 0.1, "syncRefModel": True, "refModelSyncSteps": 1}},
    }
    for name, fields in settings.items():
        lora = fields.get("lora", False)
        trainer = Trainer(model, data, f"copies-{name}", **fields)
        take_step(trainer.policy, 0, trainer.config.training)
        expected = read_manifest(trainer.save())
        lacking = trainer.reserve()
        weights = {name: weight.clone() for name, weight in trainer.policy.merged_weights()}
        pending, go = trainer.begin()
        is_written = pending.is_written
        memory, used = trainer.background.staging._memory, trainer.background.staging._used
        assert memory is not None
        reserved = memory.result().bytes.nbytes
        trainer.spoil()
        go.set()
        published = pending.publish()
        found = read_manifest(published)
        trainer.background.end()
        own = [file for file in pending.writer.entries if file.endswith(".safetensors")]
        files = {file for file in expected.keys() | found.keys() if expected.get(file) != found.get(file)}
        different[name] = {
            "files": sorted(files),
            "lacking": lacking,
            "is_written": is_written,
            "is_measured": used <= reserved <= used + 512,
            "names": trainer.names(),
            "own": own,
            "same": lora or same(weights, published / "model"),
        }
    return different


def same(weights, folder):
    """Return whether a folder's files hold these weights, bit for bit."""
    saved = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], weight) for name, weight in weights.items())


def limited(model, data):
    """Limit the size of rank 1's files while it writes."""
    trainer = Trainer(model, data, "limited")
    trainer.save()
    trainer.reserve()
    pending, go = trainer.begin()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    go.set()
    error = error_of(pending.publish)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result = {"error": error, "names": trainer.names()}
    pending, go = trainer.begin()
    go.set()
    pending.publish()
    trainer.background.end()
    return result | {"names_without_limit": trainer.names()}


def superseded(model, data):
    """Let a newer attempt take over while a checkpoint is written."""
    trainer = Trainer(model, data, "superseded")
    trainer.save()
    trainer.reserve()
    pending, go = trainer.begin()
    if dist.get_rank() == 0:
        Fence.take(trainer.data / "superseded", 1, "uid-1")
    newer = trainer.open(1)
    go.set()
    error = error_of(pending.publish)
    newer.check()
    trainer.background.end()
    return {"error": error, "names": trainer.names()}


def ended(model, data):
    """End the thread before a checkpoint is written, as a rank that fails does; then resume."""
    trainer = Trainer(model, data, "ended")
    trainer.save()
    trainer.reserve()
    _, go = trainer.begin()
    trainer.background.has_ended = True
    go.set()
    trainer.background.end()
    source = trainer.open(1).find(None, world_size=2, zero_stage=2)
    return {"found": source and source.state.step, "names": trainer.names()}


def lacking(model, data):
    """Let the pod of rank 1 have too little memory."""
    trainer = Trainer(model, data, "lacking")
    size = trainer.checkpoints.num_bytes(trainer.policy)
    if dist.get_rank() == 1:
        vars(staging)["free_memory"] = lambda: size
    message = trainer.reserve()
    return {"message": message, "is_reserved": trainer.background.staging.is_reserved}


def main(model, data, *scenarios):
    join(Device.CPU, 60)
    report({scenario: globals()[scenario](model, data) for scenario in scenarios})


main(*sys.argv[1:])
