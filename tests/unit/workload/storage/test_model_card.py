"""The hub reads a model's card, and it has the run's numbers."""

import math

from huggingface_hub import ModelCard

from grpo_spec.trainer import TrainerConfig
from grpo_workload.storage.model_card import model_card

CONFIG = {
    "model": {"name": "org/base"},
    "dataset": {"name": "org/rows"},
    "rewards": [{"name": "accuracy", "accuracy": {}}, {"name": "stopped", "stopped": {}, "weight": 0.1}],
    "evaluation": {"dataset": {"name": "org/rows", "split": "test"}, "everySteps": 10},
    "lora": {"r": 8, "loadIn4Bit": True},
}
METRICS = {"reward": 0.5, "kl": math.nan, "loss": 0.1}
EVALUATION = {"eval/reward": 0.75, "eval/rewards/accuracy/mean": 0.7, "eval/num_prompts": 9.0}


def test_a_card_names_base_data_numbers_and_settings() -> None:
    config = TrainerConfig.model_validate(CONFIG)
    card = ModelCard(model_card(config, "my-job", 40, METRICS, EVALUATION, has_adapters=True))
    assert (card.data.base_model, card.data.datasets, card.data.model_name) == ("org/base", "org/rows", "my-job")
    assert ("grpo" in card.data.tags, card.data.library_name) == (True, "peft")
    results = {one.metric_type: (one.metric_value, one.dataset_split) for one in card.data.eval_results}
    assert results == {"eval/reward": (0.75, "test"), "eval/rewards/accuracy/mean": (0.7, "test")}
    for line in (
        "# my-job, after 40 steps",
        "| reward | 0.5 |",
        "| rewards | accuracy x 1, stopped x 0.1 |",
        "| adapters | LoRA, r 8, alpha 32, of a base model in 4 bits (NF4",
    ):
        assert line in card.text
    assert "| kl |" not in card.text, "it is not a number"


def test_a_card_of_a_model_from_a_folder_names_no_repository() -> None:
    config = CONFIG | {"model": {"path": "/models/base"}, "dataset": {"path": "/data/rows.jsonl"}}
    card = ModelCard(model_card(TrainerConfig.model_validate(config), "my-job", 1, METRICS, {}))
    assert (card.data.base_model, card.data.datasets, card.data.eval_results) == (None, None, None)
    assert "`/models/base`" in card.text
