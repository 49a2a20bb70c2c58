"""Tiny vision-language models with random weights, with the processors of their families, made without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from grpo_workload.algorithm.samples import PromptImages
from grpo_workload.storage.files import make_readable
from support.trainer.tiny_model import SPECIAL_TOKENS

PATCH, TILE = 14, 56  # pixels of a side
START, END, IMAGE, VIDEO = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 4)  # ids of tokens
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = _TOWER | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_INTERLEAVED = {"rope_parameters": _TEXT["rope_parameters"] | {"mrope_interleaved": True}}

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({}, _TOWER | {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 1}),
    "qwen2_5_vl": (
        {"tie_word_embeddings": True},
        _TOWER
        | {"hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56}
        | {"fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (_INTERLEAVED, _QWEN3),
    "internvl": (
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [TILE, TILE],
            "patch_size": [PATCH, PATCH],
        },
    ),
}
"""Fields of each family's configuration, of the text and of the vision tower."""


def make_vision_model(family: str, *, vocab_size: int = 263, **fields: Any) -> Any:
    """Return a model in float32, with the same weights at each call."""
    text, tower = FAMILIES[family]
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    if family == "internvl":
        tokens = {"image_token_id": IMAGE, "image_seq_length": 4, "downsample_ratio": 0.5, "tie_word_embeddings": False}
    else:
        tokens |= {"vision_start_token_id": START, "vision_end_token_id": END}
    config = AutoConfig.for_model(
        family, text_config=_TEXT | {"vocab_size": vocab_size} | text, vision_config=tower, **tokens | fields
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def make_inputs(family: str, sizes: list[tuple[int, int]]) -> tuple[PromptImages, list[int]]:
    """Return random images of (height, width) in merged patches, and the tokens that stand for each.

    InternVL takes tiles: the number of them is height x width.
    """
    random = np.random.default_rng(sum(height * 7 + width for height, width in sizes))
    areas = [height * width for height, width in sizes]
    if family == "internvl":
        inputs = {"pixel_values": random.normal(size=(sum(areas), 3, TILE, TILE)).astype(np.float32)}
        tokens = [4 * area for area in areas]
    else:
        pixels = random.normal(size=(4 * sum(areas), 3 * 2 * PATCH * PATCH)).astype(np.float32)
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, 2 * h, 2 * w] for h, w in sizes])}
        tokens = areas
    return PromptImages(images=(), engine_ids=(), token_id=IMAGE, inputs=inputs), tokens


def make_vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the special tokens and the chat template of the family."""
    if family == "internvl":
        special, image = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"], "<IMG_CONTEXT>\n"
        names = ["start_image_token", "end_image_token", "context_image_token", "video_token"]
    else:
        special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        image, names = "<|vision_start|><|image_pad|><|vision_end|>", []
    tokens = [*SPECIAL_TOKENS, *special]
    vocab = {token: index for index, token in enumerate([*tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=dict(zip(names, special, strict=False)),
    )
    fast.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '" + image.replace("\n", "\\n") + "' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return fast


def make_tiny_vision(folder: Path, family: str, **fields: Any) -> Path:
    """Write a random model in float32 with its processor, which takes images of 56 x 56 pixels as 4 tokens."""
    tokenizer = make_vision_tokenizer(family)
    sides = {"height": TILE, "width": TILE}
    if family == "internvl":
        processor: Any = transformers.InternVLProcessor(
            transformers.GotOcr2ImageProcessor(size=sides, crop_to_patches=True, min_patches=1, max_patches=4),
            tokenizer,
            transformers.InternVLVideoProcessor(size=sides),
            image_seq_length=4,
            chat_template=tokenizer.chat_template,
        )
    else:
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
        size = {"shortest_edge": TILE * TILE, "longest_edge": 16 * TILE * TILE}
        processor = getattr(transformers, f"{kind}Processor")(
            transformers.Qwen2VLImageProcessor(patch_size=PATCH, merge_size=2, size=size),
            tokenizer,
            # Also for jobs without videos: vLLM 0.33 measures its memory with one.
            getattr(transformers, f"{'Qwen3' if kind == 'Qwen3VL' else 'Qwen2'}VLVideoProcessor")(patch_size=PATCH),
            chat_template=tokenizer.chat_template,
        )
    model = make_vision_model(family, vocab_size=len(tokenizer), **fields)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    make_readable(folder)
    return folder
