"""Faults of rewards, prompts and memory, one after the other on a run that is loaded once: faults.py MODEL DATA.

It reports the error of each fault, by name, and the seconds that all of them took; the steps in the journal after the
faults, after an attempt without a fault, and after one that found one prompt group missing; the completions that a
further attempt took from the journal; and the number of completions in each call of the reward of the good attempts.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import asyncio
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

from grpo_spec.contract import Contract, Device
from grpo_workload.ranks import environment

environment.prepare(Device.CPU, os.environ)

import torch
from results import error_of, report

from grpo_spec.inputs import DatasetConfig
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.overlong import prompt_limit
from grpo_workload.data.prefetch import PromptLoader
from grpo_workload.ranks.clock import Clock
from grpo_workload.reporting.start_log import StartLog
from grpo_workload.rewards.scorer import Function
from grpo_workload.storage.journal import Journal, begin_branch, read_lineage
from grpo_workload.training.assemble import load
from grpo_workload.training.rollout import roll_out

GENERATIONS = 4
calls: list[int] = []


def scores(prompts, completions):
    calls.append(len(completions))
    return [float(len(completion.token_ids) % 2) for completion in completions]


def one_raises(prompts, completions):
    raise KeyError("colour")


def hangs(prompts, completions):
    threading.Event().wait()


def is_full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


REWARDS = {
    "raises": one_raises,
    "hangs": hangs,
    "nan": lambda prompts, completions: [float("nan")] * 12,
    "one value too few": lambda prompts, completions: [0.0] * 11,
}
PROMPTS = {"empty": "", "too long": "x" * 130}


class Attempts:
    """Attempts of one run, each from its start, each with its own reward function and prompts."""

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
        contract = {"job": job, "attempt": 0, "device": "cpu", "members": [member], "durable": True, "config": config}
        self.run_dir = data / "ns/job/faults"
        self.run = load(
            Contract.model_validate(contract),
            asyncio.Runner(),
            StartLog(0),
            data_dir=data,
            state_dir=Path(os.environ["GRPO_STATE_DIR"]),
        )
        self.attempt = 0

    def begin(self, function, prompts=None, forget=()):
        """Roll out the first step of a new attempt, without the journal's groups at positions `forget`."""
        self.attempt += 1
        branch, known = begin_branch(self.run_dir, attempt=self.attempt, step=0)
        (reward,) = self.run.rewards
        run = dataclasses.replace(
            self.run,
            rewards=[dataclasses.replace(reward, scorer=Function(function), timeout_seconds=0.5)],
            prompts=prompts or self.run.prompts,
            journal=Journal(self.run_dir, branch, 0),
            known={group.place: group for group in known if group.position not in forget},
        )
        rollout = roll_out(run, 0, Clock()).rollouts[0]
        run.journal.close()
        return rollout

    def journal(self):
        """Return the steps in the journal, each as a list of its groups."""
        return [[dataclasses.asdict(group) for group in groups] for groups in read_lineage(self.run_dir)]


def loader(source, folder):
    return PromptLoader(
        source,
        share=range(3),
        prompts_per_step=3,
        steps=range(1),
        num_workers=0,
        prefetch_steps=1,
        timeout_seconds=60,
        folder=folder,
    )


def main(model, data):
    attempts = Attempts(model, data)
    start = time.monotonic()
    errors = {name: error_of(attempts.begin, reward) for name, reward in REWARDS.items()}
    limit = prompt_limit(attempts.run.config, attempts.run.config.dataset)
    for name, text in PROMPTS.items():
        (data / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("good", text)))
        source = load_prompts(
            DatasetConfig(path=str(data / "rows.jsonl")), attempts.run.processing_class, seed=1, limit=limit
        )
        errors[name] = error_of(attempts.begin, scores, loader(source, data))
    result = {"errors": errors, "seconds": time.monotonic() - start, "after_faults": attempts.journal()}

    attempts.begin(scores)
    result["after_success"] = attempts.journal()
    known = attempts.begin(one_raises)
    result["reused"] = [dataclasses.asdict(sample.completion) for sample in known.samples]
    attempts.begin(scores, forget=(1,))

    vars(attempts.run.policy.passes)["backward"] = is_full
    for name, count in (("many do not fit", 4), ("one does not fit", 1)):
        batches = [micro_batch(known.samples[:count])]
        errors[name] = error_of(attempts.run.policy.step, batches, 1, LossScale(num_sequences=count, num_tokens=9))
    report(result | {"calls": calls, "after_forgetting": attempts.journal()})


main(sys.argv[1], Path(sys.argv[2]))
