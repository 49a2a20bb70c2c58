"""The sections `model` and `dataset`: what the trainer works on. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from grpo_spec.schema import FunctionPath, Rule, Section, Text, one_of

VISION_FAMILIES = ("internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Types (`model_type`) of the models that can be trained on prompts with images."""


class ModelConfig(Section):
    """The policy to train."""

    RULES = (
        one_of("name", "path"),
        Rule(
            "!has(self.revision) || has(self.name)",
            "revision needs name: a folder has one state",
            lambda m: m.revision is None or m.name is not None,
        ),
    )

    name: Text | None = Field(
        None, description="Model on the Hugging Face hub, for example Qwen/Qwen2.5-1.5B-Instruct."
    )
    revision: Text | None = Field(
        None,
        description="Branch, tag or commit of `name`; a run keeps the commit that this pointed to when the run began. "
        "Set a commit to begin several jobs with the same weights.",
    )
    path: Text | None = Field(
        None, description="Folder with the model inside the container, for example below a mounted volume."
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=65536)] | None = Field(
        None,
        description="Chat template (Jinja) in place of the tokenizer's; checkpoints have it, too. Set it where the "
        "model has none, like many base models.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Type of the weights in training and generation; every rank's GPU must support it. float16 scales "
        "the loss and skips steps whose gradients overflow.",
    )
    attention: Literal["varlen", "sdpa", "eager", "flash_attention_2"] = Field(
        "varlen",
        description="Attention in training. varlen is PyTorch's kernel for packed sequences; sdpa and eager build a "
        "square mask over all tokens of a micro-batch. Set eager for models that varlen does not support; the refusal "
        "names it.",
    )
    use_liger_kernel: bool = Field(
        True,
        description="On GPUs, use Liger's fused kernels for norms, rotary embeddings and SwiGLU in models it "
        "supports. Set false to see whether a fault is Liger's.",
    )
    freeze_vision_tower: bool = Field(
        False,
        description="Train a vision-language model without its vision tower: less memory, and images mean to the "
        "model what they did before. With lora, the tower gets no adapters.",
    )

    @property
    def field(self) -> str:
        """The field that names the model, for messages."""
        return "model.path" if self.name is None else "model.name"

    @property
    def source(self) -> str:
        """Hub name or folder, whichever is set."""
        source = self.name or self.path
        assert source is not None
        return source


class ReasoningGymDataset(Section):
    """A procedural dataset of the package reasoning-gym."""

    dataset: Text = Field(description="Name of the dataset in reasoning-gym, for example basic_arithmetic.")
    params: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        default_factory=dict, max_length=64, description="Parameters of that dataset, under reasoning-gym's own names."
    )
    size: int = Field(10_000, ge=1, le=100_000_000, description="Number of problems to generate.")


class DatasetConfig(Section):
    """The source of prompts. Columns follow TRL: `prompt` is text or chat messages, `image` or `images` their images.

    Rewards get all columns but `prompt`.
    """

    RULES = (
        one_of("name", "path", "reasoning_gym"),
        Rule(
            "!has(self.promptTemplate) || self.promptTemplate.contains('{prompt}')",
            'promptTemplate must contain {prompt}, for example "{prompt} Give only the answer."',
            lambda d: d.prompt_template is None or "{prompt}" in d.prompt_template,
        ),
        Rule(
            "!has(self.config) || has(self.name)",
            "config needs name, of which it is a configuration",
            lambda d: d.config is None or d.name is not None,
        ),
        Rule(
            "!has(self.revision) || has(self.name)",
            "revision needs name: files have one state",
            lambda d: d.revision is None or d.name is not None,
        ),
        Rule(
            "!has(self.reasoningGym) || self.split == 'train'",
            "split needs name or path: reasoningGym generates its problems",
            lambda d: d.reasoning_gym is None or d.split == "train",
        ),
    )

    name: Text | None = Field(None, description="Dataset on the Hugging Face hub.")
    config: Text | None = Field(None, description="Configuration (subset) of `name`.")
    revision: Text | None = Field(
        None,
        description="Branch, tag or commit of `name`; a run keeps the commit that this pointed to when the run began. "
        "Set a commit to begin several jobs with the same rows.",
    )
    path: Text | None = Field(
        None,
        description="File (json, jsonl, parquet, csv) or folder inside the container, or in object storage, for "
        "example s3://data/math.jsonl (s3, gs, abfs; credentials: podTemplate.envFrom a Secret).",
    )
    reasoning_gym: ReasoningGymDataset | None = Field(
        None, description="Problems that reasoning-gym generates and can score."
    )
    split: Text = Field("train", description="Split of the dataset. Set it where the prompts are not in train.")
    shuffle: bool = Field(
        True,
        description="true: rows in a random order, another one in each epoch, by training.seed. Set false for a "
        "curriculum: rows in the order of the dataset.",
    )
    prompt_template: Annotated[str, Field(min_length=1, max_length=16384)] | None = Field(
        None, description="Template for plain-text prompts; must contain {prompt}, which stands for the prompt."
    )
    system_prompt: Annotated[str, Field(min_length=1, max_length=16384)] | None = Field(
        None, description="System message for prompts that are chat messages and have none."
    )
    chat_template_kwargs: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        default_factory=dict,
        max_length=32,
        description="Variables of the chat template. Set it to choose what the template offers, for example "
        "enable_thinking: false. A column chat_template_kwargs sets them for its row.",
    )
    preprocess: FunctionPath | None = Field(
        None,
        description="module:function that gets a row as a dict and returns the row to use, with `prompt`. Called "
        "shortly before the row's step.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1024,
        le=1_000_000_000,
        description="Images of more pixels (width x height) are made smaller, in their proportions, before the model's "
        "processor and engines get them; rewards get them as they are. Set it where images take too many tokens. "
        "Default: no image is.",
    )
    overlong_prompts: Literal["error", "skip", "truncate"] = Field(
        "error",
        description="For a prompt that leaves no room for maxCompletionLength tokens. error ends the job and names "
        "the row. Set skip, which takes another row, where few are too long; "
        "truncate, which keeps the prompt's last tokens, where the question is at the end.",
    )
    dataloader_num_workers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Processes on each rank that prepare its prompts (reading, preprocess, tokenizing) ahead of "
        "their step; with 0 the step waits for it. Raise it where steps wait for rows (time/prompts). Default: 2 with "
        "preprocess or images, else 0.",
    )
    prefetch_steps: int = Field(
        2,
        ge=1,
        le=1000,
        description="Number of steps for which dataloaderNumWorkers processes prepare prompts ahead. Raise it where "
        "some rows take far longer than others, and steps wait for them (time/prompts).",
    )

    @property
    def field(self) -> str:
        """The field that names the dataset, for messages."""
        if self.reasoning_gym is not None:
            return "dataset.reasoningGym"
        return "dataset.path" if self.name is None else "dataset.name"

    @property
    def source(self) -> str:
        """Hub name, file or folder, or reasoning-gym's name, whichever is set."""
        if self.reasoning_gym is not None:
            return self.reasoning_gym.dataset
        source = self.name or self.path
        assert source is not None
        return source

    @property
    def rows(self) -> tuple[str | None, ...] | None:
        """The place of the rows; None if reasoning-gym generates them."""
        return None if self.reasoning_gym else (self.name, self.config, self.path, self.split)

    @property
    def num_workers(self) -> int:
        """Number of processes that prepare prompts. Each takes some 0.4 GB: too much where rows are only tokenized."""
        return (2 if self.preprocess else 0) if self.dataloader_num_workers is None else self.dataloader_num_workers
