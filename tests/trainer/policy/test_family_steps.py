"""Mixtures of experts, latent attention and layers with a state train under ZeRO-3 as in a plain loop.

That loop is torch's AdamW on transformers' eager model. Whether ranks may choose different experts: test_step.py.
"""

import json
from pathlib import Path

from support.families import FAMILIES, make_model
from support.trainer.tiny_model import make_tiny_tokenizer

EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral")
KINDS = (*EXPERTS, "deepseek_v3", "qwen3_5_text")  # the last is a part of a model whose weights have other names


def test_two_steps_are_those_of_a_plain_loop(run_program, tmp_path):
    tokenizer, models = make_tiny_tokenizer(), []
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    for family in KINDS:
        make_model(family, whole=True, **ids).save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
        training = {} if family in FAMILIES else {"perDeviceTrainBatchSize": 1}
        modes = ["3:full", "3:lora"] if family in EXPERTS else ["3:full"]
        models.append({"path": str(tmp_path / family), "training": training, "modes": modes})
    run_program("family_steps.py", 1, "cpu", "Transformers", json.dumps(models))
    (found,) = tmp_path.glob("*/lines.jsonl")
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    expected = [(Path(model["path"]).name, mode) for model in models for mode in model["modes"]]
    assert [(line["model"], line["mode"]) for line in lines] == expected
