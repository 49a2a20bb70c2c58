"""What a user gives the trainer to work on: the sections model, dataset and rewards. See `config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from grpo_workload.section import FunctionPath, Name, Rule, Section, Size, Text, one_of

REWARD_SECONDS = 300


class ModelConfig(Section):
    """The policy to train."""

    RULES = (one_of("name", "path"),)

    name: Text | None = Field(None, description="Model on the Hugging Face hub, for example Qwen/Qwen2.5-1.5B-Instruct.")
    revision: Text | None = Field(
        None, description="Branch, tag or commit of `name`; a run stays at the commit that this was when it began."
    )
    path: Text | None = Field(None, description="Folder with the model inside the container, for example below a mounted volume.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Type of the weights in training and generation; every rank's GPU must have it. float16 scales the loss, and skips a "
        "step whose gradients overflow.",
    )
    attention: Literal["varlen", "sdpa", "eager", "flash_attention_2"] = Field(
        "varlen",
        description="Attention in training. varlen is PyTorch's kernel for packed sequences; sdpa and eager mask a square of all tokens.",
    )

    use_liger_kernel: bool = Field(
        True, description="Fused kernels of Liger for norms, rotary embeddings and SwiGLU on GPUs, for models that it knows."
    )

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
    size: int = Field(10_000, ge=1, le=100_000_000, description="Number of problems to draw.")


class DatasetConfig(Section):
    """Where prompts come from. Columns follow TRL: `prompt` is text or chat messages, every other column goes to the rewards."""

    RULES = (
        one_of("name", "path", "reasoning_gym"),
        Rule(
            "!has(self.promptTemplate) || self.promptTemplate.contains('{prompt}')",
            'promptTemplate must contain {prompt}, for example "{prompt} Give only the answer."',
            lambda d: d.prompt_template is None or "{prompt}" in d.prompt_template,
        ),
    )

    name: Text | None = Field(None, description="Dataset on the Hugging Face hub.")
    config: Text | None = Field(None, description="Configuration (subset) of `name`.")
    path: Text | None = Field(None, description="File (json, jsonl, parquet, csv) or folder inside the container.")
    reasoning_gym: ReasoningGymDataset | None = Field(None, description="Problems made by reasoning-gym, with its own scorer.")
    split: Text = Field("train", description="Split of the dataset.")
    prompt_template: Annotated[str, Field(min_length=1, max_length=16384)] | None = Field(
        None, description="Text put around a prompt that is a string; must contain {prompt}."
    )
    system_prompt: Annotated[str, Field(min_length=1, max_length=16384)] | None = Field(
        None, description="System message put before a prompt in chat form."
    )
    preprocess: FunctionPath | None = Field(
        None, description="module:function that gets each row as a dict and returns the one to use, with `prompt`, when its step is near."
    )
    dataloader_num_workers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Processes on each rank that prepare its prompts ahead of their step (reading, preprocess, tokens): by default 2 "
        "with preprocess, else 0; with 0 the step waits.",
    )
    prefetch_steps: int = Field(2, ge=1, le=1000, description="Steps that those processes are ahead.")

    @property
    def num_workers(self) -> int:
        """Processes that prepare prompts. Each takes some 0.4 GB, which rows that are only tokenized are not worth."""
        return (2 if self.preprocess else 0) if self.dataloader_num_workers is None else self.dataloader_num_workers


class Empty(Section):
    """A choice without settings of its own."""


class RewardConfig(Section):
    """One reward function; a completion's reward is the weighted sum of all that did not return None for it."""

    RULES = (
        one_of("accuracy", "reasoning_gym", "stopped", "function"),
        Rule(
            "!has(self.env) || has(self.function)",
            "env goes with function alone: built-in rewards read no variables",
            lambda r: not r.env or r.function is not None,
        ),
    )

    name: Name = Field(description="Name of the reward in metrics, as rewards/<name>/mean.")
    weight: float = Field(1.0, ge=-1000, le=1000, description="Weight in the sum.")
    accuracy: Empty | None = Field(None, description="math-verify: 1 when the answer equals the column `solution` or `answer`.")
    reasoning_gym: Empty | None = Field(None, description="The score, 0 to 1, that the reasoning-gym dataset itself gives.")
    stopped: Empty | None = Field(None, description="1 when the completion ended by itself, 0 when it was cut at maxCompletionLength.")
    function: FunctionPath | None = Field(
        None,
        description="module:function with TRL's signature f(prompts, completions, completion_ids, **columns), sync or async. It runs in a "
        "process of its own on each rank.",
    )
    env: tuple[Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_]\w*$")], ...] = Field(
        (),
        max_length=64,
        description="Variables of the pod that `function` gets, by name, for example the API key of a judge. Of all others it gets those "
        "that programs need to run (PATH, HOME, PYTHON*, CUDA_*, HF_HOME, RANK, ...), and no credentials.",
    )
    memory_limit: Size = Field(
        "8Gi",
        description="Memory of the process of `function` or `accuracy`, for example 512Mi. A call that needs more fails.",
    )
    timeout_seconds: int = Field(
        REWARD_SECONDS,
        ge=1,
        le=86_400,
        description="Limit of one call, which scores the completions of one rank and step; after it the rank fails, naming the reward.",
    )
