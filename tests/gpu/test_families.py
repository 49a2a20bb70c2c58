"""Families on a GPU, in bfloat16, colocated: what engines compute follows each push, also with adapters and experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.families import make_model
from support.paths import PROGRAMS
from support.trainer.launchers import free_ports
from support.trainer.tiny_model import make_tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("family", "trains"),
    [
        ("olmo2", "all"),
        ("smollm3", "all"),
        ("hunyuan_v1_dense", "all"),
        ("mixtral", "all"),
        ("qwen3_moe", "all"),
        ("qwen3_moe", "adapters"),
        ("glm4_moe", "all"),
        ("deepseek_v3", "all"),
        ("granitemoe", "all"),
    ],
)
def test_engines_follow_each_push(family: str, trains: str, tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    fields = SIZES | (EXPERTS if family in ("qwen3_moe", "glm4_moe", "deepseek_v3") else {})
    if family == "deepseek_v3":
        fields |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        fields |= {"num_key_value_heads": fields["num_attention_heads"]}
    model = make_model(
        family, **fields, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(PROGRAMS / "family_pushes.py"), str(tmp_path / "model"), trains, "cuda"]
    env = {**os.environ, **place, "MASTER_PORT": str(free_ports(1)[0])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print(done.stdout[-2000:])  # the differences that were measured
    assert done.returncode == 0, done.stderr[-6000:]
