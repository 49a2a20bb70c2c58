"""TRL's own reward functions, unchanged: `function: trl.rewards:...`, and `factory` for those that have settings."""

import math

import pytest
from trl import rewards as of_trl

from grpo_workload.rewards.scoring import build_rewards, close_rewards, score, take_logged
from support.trainer.reward_inputs import make_completion, make_config, make_prompt, make_source

ANSWERS = [
    "<think>\nA third of two.\n</think>\n\\boxed{\\frac{2}{3}}",
    "<think>\\boxed{\\frac{2}{3}}</think> It is \\boxed{\\frac{1}{2}}.",
    "\\boxed{0}",
]
TOKENS = [(5,) * 4, tuple(range(9)), (1, 2) * 5]
COLUMNS = {"solution": "\\frac{2}{3}"}
FUNCTIONS = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"]
FACTORIES = {
    "get_soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 4},
    "get_repetition_penalty_reward": {},
    "get_cosine_scaled_reward": {"max_len": 10, "max_value_correct": 2.0},
}


async def test_rewards_of_trl_give_the_values_that_they_give_trl():
    configs = [make_config(name.replace("_", "-"), function=f"trl.rewards:{name}") for name in FUNCTIONS]
    for name, params in FACTORIES.items():
        configs.append(make_config(name.replace("_", "-"), factory=f"trl.rewards:{name}", params=params))
    prompt = make_prompt([{"role": "user", "content": "?"}], **COLUMNS)
    completions = [make_completion(text, token_ids=ids) for text, ids in zip(ANSWERS, TOKENS, strict=True)]
    rewards = build_rewards(configs, make_source(COLUMNS))
    try:
        table = await score(rewards, [prompt] * 3, completions)
        logged = take_logged(rewards)
    finally:
        close_rewards(rewards)

    arguments = {
        "completions": [[{"role": "assistant", "content": text}] for text in ANSWERS],
        "completion_ids": [list(ids) for ids in TOKENS],
        "solution": [COLUMNS["solution"]] * 3,
    }
    functions = [getattr(of_trl, name) for name in FUNCTIONS]
    functions += [getattr(of_trl, name)(**params) for name, params in FACTORIES.items()]
    assert table.values == [pytest.approx(function(**arguments)) for function in functions]
    assert all(math.isfinite(total) for total in table.totals)
    assert logged["accuracy-reward"].extra["answer_parsed"][2] == "[0, '0']"
    assert not logged["think-format-reward"].extra
