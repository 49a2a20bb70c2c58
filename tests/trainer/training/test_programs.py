"""A whole job whose episodes a program plays, on the engine inside the rank: it trains on what the engine has sampled.

Two steps, of which the second is begun before the first has ended, and an evaluation.
"""

import math

import pytest
from transformers import AutoTokenizer

from grpo_spec.reports import ExitCode
from support.trainer.trainings import lines_of, make_config

LENGTH = 150
# Of time, of the plan, or a number that each rank's reward draws.
OTHER = (
    "time",
    "tokens_per_second",
    "step_time",
    "ranks",
    "padding_fraction",
    "episodes/call_seconds",
    "episodes/wait_seconds",
    "rewards/even/drawn",
)


@pytest.mark.vllm
def test_a_job_trains_on_the_conversations_of_a_program(start_training, tiny_model, tmp_path):
    config = make_config(tiny_model, max_steps=2, engine="vLLM")
    config["environments"] = [{"name": "chat", "program": "chatting:play", "memoryLimit": "2Gi"}]
    config["rewards"] += [{"name": "own", "environment": {}}]
    config["generation"]["maxModelLen"] = 384
    config["training"] |= {"promptsPerStep": 2, "maxCompletionLength": LENGTH, "maxStaleness": 1}
    config["evaluation"] = {"dataset": config["dataset"], "everySteps": 2, "maxPrompts": 2, "atStart": False}
    ranks = start_training(config, 1)
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    run_dir = tmp_path / "data" / "ns" / "job" / "uid"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    groups = [group for path in sorted(run_dir.glob("journal/*/*/*.gz")) for group in lines_of(path)]
    assert len(groups) == 4
    for group in groups:
        for number, completion in enumerate(group["completions"]):
            check(completion, group["rewards"]["own"][number], tokenizer)
        assert len({tuple(one["tokenIds"]) for one in group["completions"]}) > 1, "each has seeds of its own"
    lines = lines_of(run_dir / "metrics.jsonl")
    trained = [line for line in lines if "loss" in line]
    assert [line["episodes/turns/mean"] for line in trained] == [4, 4]
    assert [line["episodes/sequences/mean"] for line in trained] == [2, 2]
    assert all(line["episodes/lost"] == 0 and math.isfinite(line["loss"]) for line in trained)
    assert all(line["grad_norm"] > 0 for line in trained)
    assert trained[0]["trained/sampling/sampling_logp_difference/max"] < 1e-3, "the policy reads the same tokens"
    assert any(line.get("eval/episodes/turns/mean") == 4 for line in lines)


@pytest.mark.vllm
def test_two_ranks_train_on_the_forks_of_programs_as_one_does(start_training, tiny_model, tmp_path):
    curves = []
    for num_ranks in (1, 2):
        config = make_config(tiny_model, max_steps=2, engine="vLLM")
        config["environments"] = [{"name": "chat", "program": "chatting:play", "memoryLimit": "2Gi"}]
        config["generation"]["maxModelLen"] = 384
        config["training"] |= {"maxCompletionLength": LENGTH, "perDeviceTrainBatchSize": 2}
        ranks = start_training(config, num_ranks, uid=f"ranks-{num_ranks}")
        assert ranks.exit_codes() == [ExitCode.DONE] * num_ranks, ranks.logs()
        curves.append(lines_of(tmp_path / "data" / "ns" / "job" / f"ranks-{num_ranks}" / "metrics.jsonl"))
    for alone, shared in zip(*curves, strict=True):
        assert shared["episodes/sequences/mean"] == 2
        assert alone["grad_norm"] > 0
        for name, value in alone.items():
            if not name.startswith(OTHER):
                assert shared[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        # One has sampled two prompts of three; a third of its episodes or so has moved.
        edges = [shared[f"ranks/trained_tokens/{which}"] for which in ("min", "max")]
        assert sum(edges) == alone["ranks/trained_tokens/max"]
        assert edges[1] < 1.2 * edges[0]


def check(completion, reward, tokenizer):
    """It is one turn of a history of its own, and a fork of three turns, with what the template writes between them."""
    episode = completion["episode"]
    (fork,) = episode["forks"]
    (last,) = check_sequence(completion, episode, [], tokenizer)
    assert [one["content"] for one in episode["messages"]] == [last]
    said = check_sequence(fork, fork, ["And?", "Why?"], tokenizer)
    written = [{"role": "user", "content": f"Three times: {len(''.join(said))}."}]
    assert episode["asked"] == written
    asked = tokenizer.apply_chat_template(written, add_generation_prompt=True, return_dict=False)
    assert (episode["turns"], episode["promptIds"]) == (4, asked)
    assert reward == pytest.approx(len("".join([*said, last])) / 100)


def check_sequence(sequence, spans, says, tokenizer):
    """Its tokens are those of turns, and between them what the chat template writes; returns what was said."""
    tokens, logprobs, context = sequence["tokenIds"], sequence["logprobs"], spans["context"]
    bounds = [0, *(bound for span in context for bound in span), len(tokens)]
    turns = [tokens[start:stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    assert all(1 <= len(turn) <= 8 for turn in turns)
    for (start, stop), say in zip(context, says, strict=True):
        assert set(logprobs[start:stop]) == {0.0}
        ended = tokens[start - 1] in tokenizer.all_special_ids
        whole = f"\n<|im_start|>user\n{say}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(tokens[start:stop]) == ("" if ended else "<|im_end|>") + whole
    assert all(
        value < 0
        for value, place in zip(logprobs, range(len(tokens)), strict=True)
        if not any(start <= place < stop for start, stop in context)
    )
    return [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
