"""Real ranks whose environments fail in too many episodes, or do not begin: they end by themselves, and say why."""

import gzip
import json
import math
import re
import sys

import pytest

from grpo_devcluster.progress import wait_until
from grpo_spec.reports import ExitCode
from grpo_spec.trainer import TrainerConfig
from support.paths import PROGRAMS
from support.trainer.environment_pods import EnvironmentPod
from support.trainer.tool_template import TOOL_TEMPLATE
from support.trainer.trainings import make_config


def fickle_config(model, factory, **episodes):
    config = make_config(model, max_steps=1, engine="vLLM")
    config["model"]["chatTemplate"] = TOOL_TEMPLATE
    config["environments"] = [{"name": "game", "factory": f"fickle:{factory}", "memoryLimit": "2Gi"}]
    config["generation"]["maxModelLen"] = 384
    config["training"] |= {"promptsPerStep": 6, "numGenerations": 2}
    return config | {"episodes": episodes}


def message_of(folder):
    return json.loads((folder / "train-uid" / "state-0" / "error.json").read_text())["message"]["message"]


@pytest.mark.vllm
def test_too_many_lost_episodes_end_the_attempt_with_their_causes(start_training, tiny_model, tmp_path):
    ranks = start_training(fickle_config(tiny_model, "Fickle", retries=1, maxFailedShare=0.25), 1)
    assert ranks.exit_codes() == [ExitCode.ENVIRONMENT_FAILED], ranks.logs()
    message = message_of(tmp_path)
    found = re.search(r"failed in (\d+) of 12 episodes, also when they began again \((.*)\), and epi", message)
    counts = {cause: int(number) for number, cause in re.findall(r"(\d+) (\w+)", found[2])}
    assert counts.keys() == {"reset", "connection"}
    assert int(found[1]) == sum(counts.values()) < 12
    assert re.search(r"the last failure: environments\[game\]\.factory: .*(no such level|server is away)", message)
    assert not [*tmp_path.glob("data/ns/job/uid/journal/*/*/*.gz")], "the next attempt samples them again"

    ranks = start_training(fickle_config(tiny_model, "Fickle", retries=1, maxFailedShare=1), 1)
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    (line,) = (json.loads(line) for line in (tmp_path / "data/ns/job/uid/metrics.jsonl").read_text().splitlines())
    assert line["episodes/lost"] == sum(counts.values()), "seeds say which fail"
    assert {cause: line[f"episodes/lost/{cause}"] for cause in counts} == counts
    assert line["episodes/retries"] == line["episodes/lost"]
    assert line["completions/min_length"] >= 1
    assert (line["rewards/even/unscored"], line["skipped"]) == (0, 0)
    assert math.isfinite(line["loss"])
    assert line["grad_norm"] > 0


@pytest.mark.vllm
def test_an_environment_that_does_not_begin_is_no_fault_of_the_rank(start_training, tiny_model, tmp_path):
    ranks = start_training(fickle_config(tiny_model, "gone"), 1)
    assert ranks.exit_codes() == [ExitCode.ENVIRONMENT_FAILED], ranks.logs()
    assert "environments[game]: its process ended with exit code 3" in message_of(tmp_path)


@pytest.mark.vllm
def test_a_pod_that_is_killed_while_episodes_begin_costs_a_second_try(
    start_training, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path, str(PROGRAMS)])
    config = fickle_config(tiny_model, "Drawn")
    config["environments"][0]["params"] = {"folder": str(tmp_path)}
    config["rewards"].append({"name": "drawn", "environment": {}})
    pods = [EnvironmentPod(tmp_path / name, TrainerConfig.model_validate(config)) for name in ("a", "b")]
    groups = [{"name": "games", "sessions": 8, "environments": ["game"], "addresses": [pod.address for pod in pods]}]
    try:
        for pod in pods:
            pod.wait_until_ready()
        (tmp_path / "begun").unlink(missing_ok=True)
        ranks = start_training(config, 1, environment_pods=groups)
        wait_until((tmp_path / "begun").exists, "an episode begins", 300)
        pods[0].kill()
        assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    finally:
        for pod in pods:
            pod.kill()
    (line,) = (json.loads(line) for line in (tmp_path / "data/ns/job/uid/metrics.jsonl").read_text().splitlines())
    assert (line["episodes/lost"], line["skipped"]) == (0, 0)
    assert line["episodes/retries"] > 0
    (journal,) = tmp_path.glob("data/ns/job/uid/journal/*/*/*.gz")
    with gzip.open(journal, "rt") as file:
        groups = [json.loads(line) for line in file]
    drawn = [set(group["rewards"]["drawn"]) for group in groups]
    assert [len(one) for one in drawn] == [1] * 6, (
        "both of a prompt have drawn the same number, also if they began again"
    )
    assert len(set.union(*drawn)) == 6
