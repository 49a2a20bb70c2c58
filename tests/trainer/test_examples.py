"""Examples whose model, rows and sizes are tiny, and else as they are: one step on a CPU, with an engine in the rank.

Left out: what needs a server beside the job or engine pods, and what the tiny model is not (4 bits, experts).
"""

import json
import os

import pytest
import yaml

from grpo_spec.reports import ExitCode
from support.documents import write_code
from support.paths import EXAMPLES
from support.trainer.rank_server import PYTHONPATH
from support.trainer.trainings import lines_of

ADD = "What is 2 + 2?"
ROWS = {
    "trl-lib/DeepMath-103K": {"prompt": [{"role": "user", "content": ADD}], "solution": "4"},
    "HuggingFaceH4/MATH-500": {"problem": ADD, "solution": "4", "answer": "4"},
    "open-r1/DAPO-Math-17k-Processed": {"prompt": ADD, "solution": "4"},
    "trl-lib/tldr": {"prompt": "POST: We met. TL;DR:", "completion": " They met."},
    "google-research-datasets/mbpp": {
        "text": "Double a number.",
        "test_list": ["assert twice(2) == 4"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "Salesforce/xlam-function-calling-60k": {
        "query": ADD,
        "tools": "[]",
        "answers": '[{"name": "add", "arguments": {}}]',
    },
}
"""A row of each dataset, with the columns that its page on the hub names; no test reads the hub."""

NAMES = ("qwen3-math", "dapo", "tldr", "code-tests", "function-calls", "one-80gb-gpu", "two-nodes-32b")


def tiny_dataset(dataset, folder):
    """Return a dataset without the hub: sixteen equal rows in a file."""
    if name := dataset.pop("name", None):
        for field in ("config", "split"):
            dataset.pop(field, None)
        path = folder / f"{name.replace('/', '-')}.jsonl"
        path.write_text(f"{json.dumps(ROWS[name])}\n" * 16)
        dataset["path"] = str(path)
    dataset.pop("chatTemplateKwargs", None)  # variables of Qwen's template
    return dataset


def tiny(spec, model, folder):
    """Return a rank's configuration."""
    for field in ("trainer", "podTemplate", "network"):
        spec.pop(field, None)
    del spec["storage"]["claimName"]
    spec["model"] = {"path": str(model), "dtype": "float32"}
    tiny_dataset(spec["dataset"], folder)
    spec["training"] |= {"maxSteps": 1, "promptsPerStep": 2, "numGenerations": 2, "maxCompletionLength": 16}
    if "stepsPerGeneration" in spec["training"]:
        spec["training"]["stepsPerGeneration"] = 2
    for reward in spec["rewards"]:
        reward.pop("timeoutSeconds", None)  # the tests' ranks wait for each other for 300 s
        if "softOverlong" in reward:
            reward["softOverlong"] = {"maxLength": 16, "cacheLength": 8}
    spec["generation"] |= {"tensorParallel": 1, "maxModelLen": 512, "kvCacheMemory": "64Mi"}
    spec["generation"]["engineArgs"] = {"enforce_eager": True}
    if "evaluation" in spec:
        tiny_dataset(spec["evaluation"]["dataset"], folder)
        spec["evaluation"] |= {"everySteps": 1, "atStart": False, "maxPrompts": 2}
    return spec


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains(name, start_training, tiny_model, tmp_path):
    manifest = EXAMPLES / f"{name}.yaml"
    *_, job = yaml.safe_load_all(manifest.read_text())
    write_code(manifest, tmp_path)
    ranks = start_training(tiny(job["spec"], tiny_model, tmp_path), 1, PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHONPATH}")
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    (metrics,) = (tmp_path / "data/ns/job/uid").glob("metrics*.jsonl")
    logged = lines_of(metrics)
    assert any("loss" in row for row in logged)
    assert any("eval/reward" in row for row in logged) == ("evaluation" in job["spec"])
