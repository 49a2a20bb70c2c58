"""What the storage does to checkpoints, on 2 ranks: storage.py MODEL DATA SCENARIO..., each a function below, with a run of its name."""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import resource
import sys
from pathlib import Path

from grpo_workload import environment
from grpo_workload.contract import Device

environment.prepare(Device.CPU, os.environ)

import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from grpo_workload.checkpoint import Checkpoints, TrainerState
from grpo_workload.checkpoint_writer import StorageError
from grpo_workload.claim import Claim, SupersededError
from grpo_workload.collectives import gather
from grpo_workload.config import TrainerConfig
from grpo_workload.engine import Policy

PAD = 2


class Trainer:
    """A policy that is saved, without being trained, by runs of any name."""

    def __init__(self, model, data):
        config = {
            "model": {"path": model, "dtype": "float32"},
            "dataset": {"path": "unused"},
            "rewards": [{"name": "unused", "stopped": {}}],
        }
        self.policy = Policy(TrainerConfig.model_validate(config), Device.CPU, timeout_seconds=60, pad_token_id=PAD)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.data = Path(data)

    def open(self, run, *, keep=2, epoch=0):
        return Checkpoints(self.data, run, keep=keep, epoch=epoch, pod_uid=f"uid-{epoch}")

    def save(self, checkpoints, step):
        state = TrainerState(step=step, weight_version=step, num_tokens=0, world_size=2, zero_stage=2)
        return checkpoints.save(self.policy, self.tokenizer, state)

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
    assert trainer.find(trainer.open("damaged", keep=3, epoch=1)) == 1
    assert trainer.names("damaged") == ["damaged-step-2", "damaged-step-3", "step-1"]
    checkpoints = trainer.open("damaged", keep=3, epoch=2)
    assert trainer.find(checkpoints) == 1
    trainer.save(checkpoints, 2)
    assert trainer.names("damaged") == ["step-1", "step-2"]

    on_rank(0, lambda: (folders[0] / "trainer.json").write_text("{}"))
    on_rank(0, lambda: (folders[1] / "model" / "model.safetensors").unlink())
    with pytest.raises(
        ValueError, match=r"none .* is whole: \S*step-2 \(model/model.safetensors: cannot be read.*step-1 \(trainer.json: has 2"
    ):
        trainer.find(trainer.open("damaged", epoch=3))
    assert trainer.names("damaged") == ["step-1", "step-2"], "and it stays so: the next epoch must not begin at step 0"


def superseded(trainer):
    checkpoints = trainer.open("superseded", keep=1, epoch=3)
    checkpoints.check()
    trainer.save(checkpoints, 1)
    on_rank(0, lambda: Claim.take(trainer.data / "superseded", 4, "uid-of-its-successor"))
    for attempt in (checkpoints.check, lambda: trainer.save(checkpoints, 2)):
        with pytest.raises(
            SupersededError, match=r"epoch 3 .* superseded by epoch 4, claimed by pod uid uid-of-its-successor; nothing was"
        ):
            attempt()
    assert trainer.names("superseded") == ["step-1"]
    with pytest.raises(SupersededError):
        trainer.open("superseded", epoch=3)


def superseded_while_saving(trainer):
    checkpoints = trainer.open("superseded_while_saving", epoch=3)
    trainer.save(checkpoints, 1)
    get_weights = trainer.policy.saved_weights  # asked for after DeepSpeed has saved, before anything is published

    def weights():
        if dist.get_rank() == 0:
            Claim.take(trainer.data / "superseded_while_saving", 4, "uid-4")
        return get_weights()

    trainer.policy.saved_weights = weights
    with pytest.raises(SupersededError, match=r"superseded by epoch 4, claimed by pod uid uid-4"):
        trainer.save(checkpoints, 2)
    trainer.policy.saved_weights = get_weights
    trainer.open("superseded_while_saving", epoch=5)
    assert trainer.names("superseded_while_saving") == ["step-1"]


def limited(trainer):
    """One rank's files may not grow: no more than the folder's quota would let them."""
    checkpoints = trainer.open("limited", keep=1)
    trainer.save(checkpoints, 1)
    for rank, file in ((1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"), (0, "mp_rank_00_model_states.pt")):
        on_rank(rank, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY)))
        with pytest.raises(StorageError, match=rf"^storage.claimName: .*{file}: .*File too large. It needs about [\d,]+ bytes.*step-1"):
            trainer.save(checkpoints, 2)
        on_rank(rank, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
        assert trainer.names("limited") == ["step-1"]
        assert trainer.find(checkpoints) == 1
    trainer.save(checkpoints, 2)
    assert trainer.names("limited") == ["step-2"]


def full(trainer):
    """DATA is a volume that holds one checkpoint, and not two."""
    checkpoints = trainer.open("full", keep=1)
    trainer.save(checkpoints, 1)
    with pytest.raises(
        StorageError, match=r"^storage.claimName: .*No space left on device.*needs about [\d,]+ bytes.*[\d,]+ are free.*step-1"
    ):
        trainer.save(checkpoints, 2)
    assert trainer.names("full") == ["step-1"]
    assert trainer.find(checkpoints) == 1


def endless(trainer):
    """Save until killed."""
    checkpoints = trainer.open("endless", keep=2)
    step = trainer.find(checkpoints) or 0
    while True:
        step += 1
        trainer.save(checkpoints, step)


def main(model, data, *scenarios):
    trainer = Trainer(model, data)
    for scenario in scenarios:
        globals()[scenario](trainer)


main(*sys.argv[1:])
