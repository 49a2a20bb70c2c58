"""Real ranks whose environments fail in too many episodes, or do not begin: they end by themselves, and say why."""

import math
import re

import pytest

from grpo_spec.reports import ExitCode
from support.trainer.tool_template import TOOL_TEMPLATE
from support.trainer.trainings import lines_of, make_config


def fickle_config(model, factory, **episodes):
    config = make_config(model, max_steps=1, engine="vLLM")
    config["model"]["chatTemplate"] = TOOL_TEMPLATE
    config["environments"] = [{"name": "game", "factory": f"fickle:{factory}", "memoryLimit": "2Gi"}]
    config["generation"]["maxModelLen"] = 384
    config["training"] |= {"promptsPerStep": 6, "numGenerations": 2}
    return config | {"episodes": episodes}


@pytest.mark.vllm
def test_too_many_lost_episodes_end_the_attempt_with_their_causes(start_training, tiny_model, tmp_path):
    ranks = start_training(fickle_config(tiny_model, "Fickle", retries=1, maxFailedShare=0.25), 1)
    assert ranks.exit_codes() == [ExitCode.ENVIRONMENT_FAILED], ranks.logs()
    message = ranks.error()
    found = re.search(r"failed in (\d+) of 12 episodes, also when they began again \((.*)\), and epi", message)
    counts = {cause: int(number) for number, cause in re.findall(r"(\d+) (\w+)", found[2])}
    assert counts.keys() == {"reset", "connection"}
    assert int(found[1]) == sum(counts.values()) < 12
    assert re.search(r"the last failure: environments\[game\]\.factory: .*(no such level|server is away)", message)
    assert not [*tmp_path.glob("data/ns/job/uid/journal/*/*/*.gz")], "the next attempt samples them again"

    ranks = start_training(fickle_config(tiny_model, "Fickle", retries=1, maxFailedShare=1), 1)
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    (line,) = lines_of(tmp_path / "data/ns/job/uid/metrics.jsonl")
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
    assert "environments[game]: its process ended with exit code 3" in ranks.error()
