"""Faults of rewards and prompts, one after the other on a run that is loaded once: faults.py MODEL DATA."""

# ruff: noqa: E402  # variables have to be set before the imports

import asyncio
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

from grpo_workload import environment
from grpo_workload.contract import Contract, Device

environment.prepare(Device.CPU, os.environ)

import pytest

from grpo_workload.clock import Clock
from grpo_workload.inputs import DatasetConfig
from grpo_workload.journal import Journal, begin_branch, read_lineage
from grpo_workload.prefetch import PromptLoader
from grpo_workload.prompt_making import PromptError
from grpo_workload.rewards import RewardError
from grpo_workload.rollout import roll_out
from grpo_workload.setup import load
from grpo_workload.tasks import load_prompts

GENERATIONS = 4
calls = []


def scores(prompts, completions):
    calls.append(len(completions))
    return [float(len(completion.token_ids) % 2) for completion in completions]


def one_raises(prompts, completions):
    raise KeyError("colour")


def hangs(prompts, completions):
    threading.Event().wait()


FAULTS = {
    r"rewards\[mine\] raised KeyError: 'colour'": one_raises,
    r"rewards\[mine\] was not done with 12 completions within 0.5 s": hangs,
    r"rewards\[mine\] returned nan for completion 0 of 12, an answer to prompt \d+ ": lambda prompts, completions: [float("nan")] * 12,
    r"rewards\[mine\] returned 11 values for 12 completions": lambda prompts, completions: [0.0] * 11,
}
PROMPTS = {
    r"`prompt` of row 1 is empty": "",
    r"prompt 1 of the dataset has 130 tokens; generation.maxModelLen less training.maxCompletionLength leaves 122": "x" * 130,
}


class Attempts:
    """Attempts of one run, each from its start, with a reward function and prompts of its own."""

    def __init__(self, model, data):
        config = {
            "model": {"path": model, "dtype": "float32"},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
            "rewards": [{"name": "mine", "stopped": {}, "timeoutSeconds": 1}],
            "training": {"maxSteps": 1, "promptsPerStep": 3, "numGenerations": GENERATIONS, "maxCompletionLength": 6},
            "generation": {"engine": "Transformers", "maxModelLen": 128},
        }
        member = {"pod": "job-0", "group": "a", "host": "127.0.0.1", "gpus": 1, "rankOffset": 0}
        job = {"namespace": "ns", "name": "job", "uid": "faults"}
        contract = {"job": job, "epoch": 0, "device": "cpu", "members": [member], "durable": True, "config": config}
        self.run_dir = data / "ns/job/faults"
        self.run = load(Contract.model_validate(contract), asyncio.Runner(), data_dir=data, state_dir=Path(os.environ["GRPO_STATE_DIR"]))
        self.epoch = 0

    def attempt(self, function, prompts=None, forget=()):
        """The first half of the first step of a new attempt, which does not know the groups of the prompts `forget`."""
        self.epoch += 1
        branch, known = begin_branch(self.run_dir, epoch=self.epoch, step=0)
        (reward,) = self.run.rewards
        run = dataclasses.replace(
            self.run,
            rewards=[dataclasses.replace(reward, function=function, timeout_seconds=0.5)],
            prompts=prompts or self.run.prompts,
            journal=Journal(self.run_dir, branch, 0),
            known={group.position: group for group in known if group.position not in forget},
        )
        rollout = roll_out(run, 0, Clock())
        run.journal.close()
        return rollout


def loader(source, folder):
    steps = {"share": range(3), "prompts_per_step": 3, "steps": range(1)}
    return PromptLoader(source, **steps, num_workers=0, prefetch_steps=1, timeout_seconds=60, folder=folder)


def main(model, data):
    attempts = Attempts(model, data)
    start = time.monotonic()
    for message, function in FAULTS.items():
        with pytest.raises(RewardError, match=message):
            attempts.attempt(function)
    for message, text in PROMPTS.items():
        (data / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("good", text)))
        source = load_prompts(DatasetConfig(path=str(data / "rows.jsonl")), attempts.run.tokenizer, seed=1)
        with pytest.raises(PromptError, match=message):
            attempts.attempt(scores, loader(source, data))
    assert time.monotonic() - start < 60

    # No attempt has come to the end of its rewards, so nothing is journalled; then all of it is used again, or the part that is there.
    assert list(read_lineage(attempts.run_dir)) == []
    attempts.attempt(scores)
    (first,) = read_lineage(attempts.run_dir)
    known = attempts.attempt(one_raises)
    assert [sample.completion for sample in known.samples] == [completion for group in first for completion in group.completions]
    attempts.attempt(scores, forget=(1,))
    assert calls == [3 * GENERATIONS, GENERATIONS]
    (again,) = read_lineage(attempts.run_dir)
    assert (again[0], again[2]) == (first[0], first[2])
    assert again[1].position == 1


main(sys.argv[1], Path(sys.argv[2]))
