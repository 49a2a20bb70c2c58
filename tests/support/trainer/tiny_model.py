"""A tiny random chat model with its tokenizer, made without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_workload.storage.files import make_readable

HEAD_SIZE = 32  # the smallest size that vLLM's attention on CPUs supports
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_tokenizer(further: int = 0, template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with 259 tokens: one for each byte, and ChatML's special tokens; <|im_end|> is pad and eos.

    `further` tokens stand for numbers. No text is read as one of them, but models may sample them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = (f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}{number}" for number in range(further))  # after a space
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet, *numbers])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = template
    return fast


def make_tiny_model(folder: Path, *, heads: int = 2, seed: int = 0) -> Path:
    """Write a random float32 Llama with 2 layers, hidden size 32 x `heads` and 2 key/value heads, and its tokenizer.

    Args:
        folder: where they are written; created if it is missing.
        heads: number of attention heads, which must be even; tensor parallelism over n GPUs needs at least n.
        seed: seed of the weights; the same seed gives the same model. The global random state does not change.

    Returns:
        `folder`, which is valid for `model.path`; transformers and vLLM both load it.
    """
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HEAD_SIZE * heads,
        intermediate_size=2 * HEAD_SIZE * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_readable(folder)
    return folder
