"""The packaged model: transformers loads it by its name on the hub, and it answers a question."""

import os
import subprocess
import sys

from grpo_demo.pretrained import MODELS, install

ASK = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
assert model.generation_config.eos_token_id == tokenizer.eos_token_id
messages = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, do_sample=False, max_new_tokens=30)[0, inputs["input_ids"].size(1) :]))
"""


def test_the_packaged_model_answers_by_its_hub_name(smollm2):
    snapshot, hub = smollm2, smollm2.parents[2]
    written = {path: path.stat().st_mtime_ns for path in hub.rglob("*")}
    assert install(MODELS["smollm2"], hub) == snapshot
    assert {path: path.stat().st_mtime_ns for path in hub.rglob("*")} == written
    assert not list(hub.rglob(".converting-*"))

    env = {**os.environ, "HF_HOME": str(hub.parent), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    answer = subprocess.run([sys.executable, "-c", ASK], env=env, text=True, capture_output=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout
    assert answer.stdout.rstrip().endswith("<|im_end|>")


def test_a_model_downloaded_from_the_hub_is_not_replaced(tmp_path):
    entry = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    for folder in ("refs", "blobs", "snapshots/0123"):
        (entry / folder).mkdir(parents=True)
    (entry / "refs" / "main").write_text("0123")
    assert install(MODELS["smollm2"], tmp_path) == entry / "snapshots" / "0123"
