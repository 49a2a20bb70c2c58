"""A whole job whose model calls tools: examples/calculator, with an environment and a reward that reads it beside.

One step, and an evaluation after it. What the files of the run say is compared with each other and with what the user's
functions return.
"""

import json
import math
import re

import pytest
import yaml
from transformers import AutoTokenizer

from grpo_spec.reports import ExitCode
from support.paths import EXAMPLES
from support.trainer.trainings import lines_of

PROMPTS, GENERATIONS, PROBLEMS, LENGTH = 1, 8, 2, 80
REWARDS = ("right", "paper", "seen")


def make_config(model):
    """Return the example's configuration for one step of few completions, with the environment."""
    *_, job = yaml.safe_load_all((EXAMPLES / "calculator" / "job.yaml").read_text())
    config = json.loads(json.dumps(job["spec"]).replace("calculator:", "calculated:"))
    for field in ("device", "trainer", "podTemplate"):
        del config[field]
    del config["storage"]["claimName"]
    del config["model"]["name"]
    config["model"]["path"] = str(model)
    config["environments"] = [{"name": "paper", "factory": "calculated:Paper", "memoryLimit": "2Gi"}]
    config["rewards"] += [
        {"name": "paper", "environment": {}},
        {"name": "seen", "function": "calculated:seen", "memoryLimit": "2Gi"},
    ]
    config["training"] |= {
        "maxSteps": 1,
        "promptsPerStep": PROMPTS,
        "numGenerations": GENERATIONS,
        "maxCompletionLength": LENGTH,
        "maxTokensPerMicroBatch": 1024,
    }
    config["evaluation"] |= {"everySteps": 1, "maxPrompts": PROBLEMS, "atStart": False}
    return config


@pytest.mark.vllm
def test_a_model_calls_tools_and_trains_on_its_own_tokens_alone(start_training, smollm2, tmp_path):
    ranks = start_training(make_config(smollm2), 1)
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    log, run_dir = (tmp_path / "train-uid/rank-0.log").read_text(), tmp_path / "data/ns/job/uid"
    assert "the chat template writes calls and results; the parser hermes reads calls" in log
    (journal,) = run_dir.glob("journal/*/*/*.gz")
    groups = lines_of(journal)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for group in groups:
        check_group(group, tokenizer)
    check_metrics(run_dir, groups)
    check_shown(lines_of(run_dir / "completions.jsonl"), groups)


def check_group(group, tokenizer):
    """The tokens of a journalled group are turns and results, and its rewards are those of the user's functions."""
    assert len({tuple(completion["episode"]["promptIds"]) for completion in group["completions"]}) == 1, (
        "the same state"
    )
    question = tokenizer.decode(group["prompt"]["tokenIds"]).removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    first, second = map(int, re.search(r"What is (\d+) \* (\d+)\?$", question).groups())
    assert len(group["completions"]) == GENERATIONS
    for number, completion in enumerate(group["completions"]):
        episode, tokens = completion["episode"], completion["tokenIds"]
        marks = episode["observation"].count("!")
        assert episode["observation"] == " Call the tool" + "!" * marks
        asked = tokenizer.decode(episode["promptIds"])
        assert asked == f"{question}{episode['observation']}<|im_end|>\n<|im_start|>assistant\n"
        assert len(tokens) == len(completion["logprobs"]) <= LENGTH
        results = [message for message in episode["messages"] if message["role"] == "tool"]
        answers = iter(results)
        for start, stop in episode["context"]:
            assert set(completion["logprobs"][start:stop]) == {0.0}
            text = tokenizer.decode(tokens[start:stop])
            end, *said, ask = re.split(r"<\|im_start\|>(?:tool\n)?", text)
            assert (end, ask) == ("\n", "assistant\n"), "it begins behind the end of the turn"
            assert said == [f"{next(answers)['content']}<|im_end|>\n" for _ in said]
        assert next(answers, None) is None
        check_calls(episode["messages"])
        assert all(value < 0 for value in own_of(completion, completion["logprobs"]))

        lines = sum(message == {"role": "tool", "name": "write", "content": "written"} for message in results)
        turn = episode["messages"][-1]
        found = re.findall(r"\d+", turn["content"])
        is_right = bool(found) and found[-1] == str(first * second) and "tool_calls" not in turn
        expected = [float(is_right), marks / 10, 10 * lines + marks - len(tokens) / 1000]
        assert [group["rewards"][name][number] for name in REWARDS] == pytest.approx(expected)


def check_calls(messages):
    """Every call of the tool is followed by its product; one that the model got wrong, by an error."""
    pending = []
    for message in messages:
        if message["role"] == "assistant":
            assert not pending, "calls without results are in the last turn alone"
            pending = [call["function"] for call in message.get("tool_calls", ())]
        else:
            call = pending.pop(0)
            assert message["name"] == call["name"]
            given = call["arguments"]
            if call["name"] == "multiply" and set(map(type, given.values())) == {int} and given.keys() == {"a", "b"}:
                assert message["content"] == str(given["a"] * given["b"])


def own_of(completion, values):
    """Return the values of sampled tokens."""
    spans = completion["episode"]["context"]
    return [one for place, one in enumerate(values) if not any(start <= place < stop for start, stop in spans)]


def check_metrics(run_dir, groups):
    (line,) = lines_of(run_dir / "metrics.jsonl")
    completions = [completion for group in groups for completion in group["completions"]]
    episodes = [completion["episode"] for completion in completions]
    lengths = [len(own_of(one, one["tokenIds"])) for one in completions]
    calls = sum(one["calls"] for one in episodes)
    assert any(one["context"] for one in episodes), "the model has read a result"
    assert line["tools/call_frequency"] == pytest.approx(calls / len(episodes))
    assert line["tools/failure_frequency"] == pytest.approx(sum(one["failedCalls"] for one in episodes) / calls)
    assert line["episodes/turns/mean"] == pytest.approx(sum(one["turns"] for one in episodes) / len(episodes))
    assert (line["episodes/lost"], line["episodes/retries"]) == (0, 0)
    assert line["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert line["completions/max_length"] == max(lengths)
    prompts = sum(len(one["promptIds"]) for one in episodes)
    assert line["num_tokens"] == prompts + sum(lengths), "as in TRL, without what the model reads between turns"
    (rank,) = lines_of(run_dir / "ranks.jsonl")[0]["ranks"]
    assert rank["generated_tokens"] == sum(lengths)
    trained = rank["trained_tokens"] - sum(len(one["tokenIds"]) for one in completions)
    assert sum(map(len, {tuple(one["promptIds"]) for one in episodes})) <= trained < prompts, "prompts are shared"
    for name in REWARDS:
        values = [value for group in groups for value in group["rewards"][name]]
        assert line[f"rewards/{name}/mean"] == pytest.approx(sum(values) / len(values))
    assert math.isfinite(line["loss"])
    assert line["grad_norm"] > 0
    assert line["trained/sampling/sampling_logp_difference/max"] < 1e-3

    (evaluated,) = lines_of(run_dir / "evaluations.jsonl")
    assert (evaluated["step"], evaluated["eval/num_prompts"]) == (1, PROBLEMS)
    assert evaluated["eval/episodes/turns/mean"] >= 1 > evaluated["eval/episodes/lost"]
    assert 0.1 <= evaluated["eval/rewards/paper/mean"] < evaluated["eval/rewards/seen/mean"]


def check_shown(shown, groups):
    """completions.jsonl has one episode of each prompt, as messages, with what reset returned."""
    assert len(shown) == PROMPTS
    for line, group in zip(shown, groups, strict=True):
        episode = group["completions"][0]["episode"]
        assert line["completion"] == episode["messages"]
        assert line["prompt"][-1]["content"].endswith(f"?{episode['observation']}")
        assert line["reward"] == pytest.approx(sum(group["rewards"][name][0] for name in REWARDS))
