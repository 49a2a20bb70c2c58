"""Forward and backward passes of a group by TRL's AsyncGRPO, whose rows hold what samples begin with once (`TreeRow`).

Its attention is FlashAttention 3 from the hub. PyTorch's takes its place here, as for `async_trainer.py`; our trainer
uses it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vs_trl.varlen_attention import Attention

Passes = Callable[[int, int, int, bool], tuple[Callable[[], None], int, int]]
"""Takes a case (tokens of the prompt, completions, tokens of each) and whether it shares its prompt. Returns a function
that runs its passes, the tokens that the model is fed, and the number of micro-batches."""


def trl_passes(folder: Path, device: str, budget: int, lora: dict[str, int]) -> Passes:
    """Load the model as TRL's AsyncGRPO does, and return the passes of a group in its rows."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import packing
    from trl.trainer.utils import add_fused_lm_head

    packing._flash_attn = lambda: Attention
    packing.register_tree_attention()
    loading = {"dtype": torch.bfloat16, "attn_implementation": packing.TREE_ATTENTION}
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, **loading).to(device)
    add_fused_lm_head(plain, temperature=1.0, outputs=("log_probs", "entropy"))
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"r": lora["r"], "lora_alpha": lora["alpha"], "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(plain, peft.LoraConfig(**options))
    model.enable_input_require_grads()
    model.train()

    def passes(prompt_tokens: int, completions: int, completion_tokens: int, shares: bool) -> Any:
        assert shares
        size, random = prompt_tokens + completion_tokens, torch.Generator().manual_seed(0)
        prompt = torch.randint(plain.config.vocab_size, (prompt_tokens,), generator=random)
        mask = torch.cat([torch.zeros(prompt_tokens), torch.ones(completion_tokens)]).long()
        rows = [packing.TreeRow()]
        for _ in range(completions):
            answer = torch.randint(plain.config.vocab_size, (completion_tokens,), generator=random)
            sample = {"input_ids": torch.cat([prompt, answer]), "completion_mask": mask, "group_id": 0}
            sample |= {"old_log_probs": torch.full((size,), -5.0), "advantage": 1.0}
            if not rows[-1].fits(sample, budget) and rows[-1].samples:
                rows.append(packing.TreeRow())
            rows[-1].add(sample)
        packed = [row.pack() for row in rows]

        def run() -> None:
            for row in packed:
                _trl_backward(
                    model, {name: one.to(device) for name, one in row.items()}, completions * completion_tokens
                )
            if device == "cuda":
                torch.cuda.synchronize()

        return run, sum(len(row["input_ids"]) for row in packed), len(packed)

    return passes


def _trl_backward(model: Any, row: dict[str, Any], num_tokens: int) -> None:
    """Run the forward pass and the loss of AsyncGRPOTrainer.compute_loss for a row, and the backward pass."""
    import torch

    longest = row["tree_max_seqlens"].tolist()
    tree = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    tree |= {"tree_max_seqlen_q": longest[0], "tree_max_seqlen_k": longest[1]}
    inputs = {name: row[name].unsqueeze(0) for name in ("input_ids", "position_ids", "shift_labels")}
    with torch.autocast(row["input_ids"].device.type, torch.bfloat16):
        outputs = model(**inputs, fused_lm_head=True, **tree)
    ratio = torch.exp(outputs.log_probs.flatten()[row["token_index"]] - row["old_log_probs"])
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.min(ratio * row["advantages"], bounded * row["advantages"]).sum() / num_tokens
    loss.backward()
