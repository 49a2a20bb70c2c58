"""One family for each kind of layer trains as a job: two steps under ZeRO-3, and a third from its checkpoint."""

import math

import pytest

from support.families import FAMILIES, MASKED, make_model
from support.trainer.tiny_model import make_tiny_tokenizer
from support.trainer.trainings import lines_of, make_config

pytestmark = pytest.mark.long

KINDS = {
    "attention": "qwen3",
    "windows": "gemma3_text",
    "soft caps": "gemma2",
    "sinks": "gpt_oss",
    "experts": "qwen3_moe",
    "latent attention": "deepseek_v3",
    "gated delta net": "qwen3_5_moe_text",
    "Mamba": "falcon_mamba",
    "Mamba-2": "falcon_h1",
    "convolutions": "lfm2",
    "chunks": "llama4_text",
}


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS.keys())
def test_a_job_trains_and_goes_on(start_training, tmp_path, family):
    tokenizer = make_tiny_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    make_model(family, **ids).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = make_config(tmp_path / "model", max_steps=2) | {"parallelism": {"zeroStage": 3}}
    config["model"] |= {"attention": "eager"} if family in MASKED else {}
    config["training"] |= {} if family in FAMILIES else {"perDeviceTrainBatchSize": 1}
    for steps in (2, 3):
        config["training"]["maxSteps"] = steps
        ranks = start_training(config, 1)
        assert ranks.exit_codes() == [0], ranks.logs()
    taken = lines_of(tmp_path / "data/ns/job/uid/metrics.jsonl")
    assert [step["step"] for step in taken] == [0, 1, 2]
    assert all(0 < step["grad_norm"] < math.inf and not step["skipped"] for step in taken)
    assert all(abs(step["trained/sampling/kl"]) < 1e-4 for step in taken), "it samples from what is trained"
