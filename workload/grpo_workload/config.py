"""What a user asks of the trainer: the sections that the CRD and the ranks share, word for word.

`grpo_operator.api` puts these models into the GRPOJob's `spec` unchanged, and the contract carries them to every rank, so a
field has one name, one default and one description. Names of training fields are TRL's `GRPOConfig`'s, camelCased.
Torch-free: the operator imports it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue

from grpo_workload.inputs import DatasetConfig, ModelConfig, RewardConfig
from grpo_workload.lora_config import LoraConfig
from grpo_workload.section import Name, Rule, Section, Size, Text, dump, in_bytes
from grpo_workload.tracking_config import TrackingConfig

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "bypass"]


class TrainingConfig(TrackingConfig):
    """GRPO itself. The batch of a step is promptsPerStep x numGenerations completions over all ranks, whatever their number."""

    num_generations: int = Field(8, ge=2, le=1024, description="Completions sampled for each prompt: the group of GRPO.")
    prompts_per_step: int = Field(8, ge=1, le=65536, description="Prompts of one optimizer step, over all ranks.")
    max_steps: int = Field(100, ge=1, le=10_000_000, description="Optimizer steps to take.")
    max_tokens_per_micro_batch: int = Field(
        8192,
        ge=1,
        le=16_777_216,
        description="Tokens of one micro-batch on one rank, which hold activations at a time; a longer sequence is alone in one.",
    )
    per_device_train_batch_size: int | None = Field(
        None, ge=1, le=1024, description="Completions of one micro-batch on one rank at most, where maxTokensPerMicroBatch allows more."
    )
    learning_rate: float = Field(1e-6, gt=0, le=1, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = Field("linear", description="Schedule of the learning rate.")
    warmup_steps: int = Field(0, ge=0, le=1_000_000, description="Steps over which the learning rate rises to its peak.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Weight decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, le=1e6, description="Gradients are clipped to this norm.")
    max_completion_length: int = Field(256, ge=1, le=1_048_576, description="New tokens of a completion at most.")
    temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature; log-probabilities are taken at it too.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 keeps the whole vocabulary.")
    top_k: int = Field(0, ge=0, le=1_000_000, description="Top-k sampling; 0 keeps the whole vocabulary.")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = Field("dapo", description="Aggregation of the token losses.")
    epsilon: float = Field(0.2, gt=0, lt=1, description="Clipping of the probability ratio below 1 (and above, unless epsilonHigh).")
    epsilon_high: float | None = Field(None, gt=0, le=10, description="Clipping of the probability ratio above 1.")
    beta: float = Field(0.0, ge=0, le=100, description="Weight of the k3 KL divergence from the initial model; 0 loads no reference.")
    importance_sampling_correction: Correction = Field(
        "sequence_mask",
        description=(
            "What is done about the generator's log-probabilities differing from the trainer's: token_* and sequence_* weigh the loss by "
            "their ratio, truncated to importanceSamplingClip* or masked outside of it; bypass takes the generator's as the old policy's; "
            "none ignores the difference."
        ),
    )
    importance_sampling_clip_max: float | None = Field(3.0, gt=0, le=1e6, description="Upper bound of the ratio that corrects the loss.")
    importance_sampling_clip_min: float | None = Field(None, ge=0, le=1, description="Lower bound of the ratio that corrects the loss.")
    scale_rewards: Literal["group", "batch", "none"] = Field("group", description="What advantages are divided by: a standard deviation.")
    mask_truncated_completions: bool = Field(False, description="Leave completions cut at maxCompletionLength out of the loss.")
    seed: int = Field(42, ge=0, le=2**31 - 1, description="Seed of data order, sampling and initialisation.")


class ParallelismConfig(Section):
    """How training is spread over the ranks (DeepSpeed)."""

    RULES = (
        Rule(
            "self.zeroStage > 0 || (self.offloadOptimizer != 'cpu' && !self.coalesceGradReduction)",
            "offloadOptimizer cpu and coalesceGradReduction need zeroStage 1, 2 or 3",
            lambda p: p.zero_stage > 0 or (p.offload_optimizer != "cpu" and not p.coalesce_grad_reduction),
        ),
        Rule(
            "self.gradientCheckpointing || !self.offloadActivations",
            "offloadActivations moves what gradientCheckpointing keeps; set that, too",
            lambda p: p.gradient_checkpointing or not p.offload_activations,
        ),
        Rule(
            "self.optimizerDtype == 'float32' || self.offloadOptimizer != 'cpu'",
            "optimizerDtype bfloat16 works with offloadOptimizer none or generating: DeepSpeed's AdamW for CPUs keeps float32",
            lambda p: p.optimizer_dtype == "float32" or p.offload_optimizer != "cpu",
        ),
    )

    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="ZeRO stage: what is partitioned over the ranks.")
    offload_optimizer: Literal["none", "cpu", "generating"] = Field(
        "none",
        description=(
            "Where optimizer states live. none: on the GPU. cpu: in the host's memory, and updated there. generating: on the GPU for the "
            "optimizer's step, and in the host's memory for the rest of it, so that completions are generated and trained on in the room "
            "that they leave (topology Colocate alone)."
        ),
    )
    optimizer_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description=(
            "Type of AdamW's states and of the weights that it updates. bfloat16 takes half the memory and loses updates that are smaller "
            "than 1/256 of a weight."
        ),
    )
    coalesce_grad_reduction: bool = Field(
        False,
        description="Reduce gradients once a step, not in every micro-batch: less traffic, and whole gradients on every rank until then.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass to save memory.")
    offload_activations: bool = Field(
        False,
        description=(
            "With gradientCheckpointing: keep what is left of activations in the host's memory until the backward pass. Larger "
            "micro-batches fit; the pod needs memory for 2 bytes x layers x hidden size of each token of a micro-batch."
        ),
    )


class Topology(StrEnum):
    """Where vLLM runs relative to the trainer."""

    COLOCATE = "Colocate"
    SERVER = "Server"
    NODE_LOCAL = "NodeLocal"


class ColocateConfig(Section):
    """vLLM inside the trainer's ranks."""

    sleep_level: Literal[0, 1, 2] = Field(
        2, description="What vLLM releases while the trainer trains: 0 nothing, 1 the cache (weights to host memory), 2 weights and cache."
    )


class GenerationConfig(Section):
    """Who samples completions, and how."""

    topology: Topology = Field(
        Topology.COLOCATE,
        description="Colocate: vLLM inside the trainer's ranks. Server: on pods of its own. NodeLocal: on GPUs of each trainer pod.",
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that one copy of the model is spread over in generation.")
    engine: Literal["vLLM", "Transformers"] = Field(
        "vLLM", description="Transformers is plain generate(), for machines that vLLM does not run on and for debugging."
    )
    max_model_len: int | None = Field(None, ge=8, le=10_485_760, description="Tokens of prompt and completion at most.")
    kv_cache_memory: Size | None = Field(
        None, description="Size of vLLM's KV cache on each rank, for example 4Gi; preferred over gpuMemoryUtilization."
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=0.9,
        description="Share of a GPU for vLLM when kvCacheMemory is not set: by default 0.3 with Colocate, 0.9 of GPUs of its own.",
    )
    engine_args: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        default_factory=dict, max_length=64, description="Further arguments of vLLM's engine, under vLLM's own names."
    )
    colocate: ColocateConfig | None = Field(None, description="Settings of the topology Colocate.")

    @property
    def is_split_over_ranks(self) -> bool:
        """Whether several ranks of the trainer hold one copy of the model for generation together."""
        return self.topology is Topology.COLOCATE and self.tensor_parallel > 1

    @property
    def sleep_level(self) -> int:
        """What a colocated engine releases while the trainer trains."""
        return (self.colocate or ColocateConfig()).sleep_level

    @property
    def gpu_share(self) -> float:
        """Share of a GPU for vLLM where its cache is not sized in bytes: of the trainer's own, or of one that vLLM has for itself."""
        return self.gpu_memory_utilization or (0.3 if self.topology is Topology.COLOCATE else 0.9)

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kvCacheMemory` in bytes."""
        return None if self.kv_cache_memory is None else in_bytes(self.kv_cache_memory)


class StorageConfig(Section):
    """Where checkpoints live, and when they are written."""

    claim_name: Name | None = Field(None, description="PersistentVolumeClaim for checkpoints; ReadWriteMany when pods share it.")
    sub_path: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$")] | None = Field(
        None, description="Folder of the claim below which runs are kept."
    )
    checkpoint_every_steps: int = Field(50, ge=1, le=1_000_000, description="Steps between checkpoints; the last step is always saved.")
    keep: int = Field(2, ge=1, le=1000, description="Checkpoints kept; older ones are deleted.")
    resume_from: Text | None = Field(None, description="Run to continue: <namespace>/<name>/<uid>, as status.checkpoint tells.")


class TrainerConfig(Section):
    """All that a rank needs to know about the training itself."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.parallelism.optimizerDtype == 'float32' || self.model.dtype == 'bfloat16'",
            "parallelism.optimizerDtype bfloat16 needs model.dtype bfloat16",
            lambda c: c.parallelism.optimizer_dtype == "float32" or c.model.dtype == "bfloat16",
        ),
        Rule(
            "self.parallelism.zeroStage > 0 || self.model.dtype != 'float16'",
            "model.dtype float16 needs parallelism.zeroStage 1, 2 or 3: DeepSpeed without ZeRO sums gradients of micro-batches in float16",
            lambda c: c.parallelism.zero_stage > 0 or c.model.dtype != "float16",
        ),
        Rule(
            "!self.parallelism.coalesceGradReduction || self.parallelism.zeroStage != 1 || self.model.dtype == 'float32'",
            "parallelism.coalesceGradReduction works with parallelism.zeroStage 2 or 3, or with model.dtype float32: DeepSpeed's optimizer "
            "of stage 1 reduces half precision once a step by itself",
            lambda c: not c.parallelism.coalesce_grad_reduction or c.parallelism.zero_stage != 1 or c.model.dtype == "float32",
        ),
        Rule(
            "!has(self.lora) || self.lora.push == 'merged' || self.generation.topology != 'Colocate'",
            "lora.push adapters needs generation.topology Server or NodeLocal: an engine inside the trainer gives its weights up when it "
            "sleeps; push merged would work",
            lambda c: not c.pushes_adapters or c.generation.topology is not Topology.COLOCATE,
        ),
        Rule(
            "self.parallelism.offloadOptimizer != 'generating' || self.generation.topology == 'Colocate'",
            "parallelism.offloadOptimizer generating needs generation.topology Colocate: other engines have GPUs of their own; none or cpu "
            "would work",
            lambda c: c.parallelism.offload_optimizer != "generating" or c.generation.topology is Topology.COLOCATE,
        ),
    )

    model: ModelConfig = Field(description="The policy to train.")
    dataset: DatasetConfig = Field(description="Where prompts come from.")
    rewards: tuple[RewardConfig, ...] = Field(
        min_length=1,
        max_length=32,
        description="Reward functions; their weighted sum is a completion's reward.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="GRPO itself.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of all weights.")
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig, description="How training is spread over the ranks.")
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="Who samples completions, and how.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Where checkpoints live, and when they are written.")

    @property
    def adapters(self) -> dict[str, Any] | None:
        """The section lora as JSON, but for how engines get it: what a checkpoint of adapters fits, beside the model."""
        return None if self.lora is None else {name: value for name, value in dump(self.lora).items() if name != "push"}

    @property
    def pushes_adapters(self) -> bool:
        """Whether engines keep the model's own weights and get adapters."""
        return self.lora is not None and self.lora.push == "adapters"
