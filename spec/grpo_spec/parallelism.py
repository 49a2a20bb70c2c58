"""The section parallelism: the spread of training over the ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_spec.schema import INTEGERS, Rule, Section


class ParallelismConfig(Section):
    """The spread of training over the ranks (DeepSpeed)."""

    RULES = (
        Rule(
            "self.zeroStage > 0 || (self.offloadOptimizer != 'cpu' && !self.coalesceGradReduction)",
            "offloadOptimizer cpu and coalesceGradReduction need zeroStage 1, 2 or 3",
            lambda p: p.zero_stage > 0 or (p.offload_optimizer != "cpu" and not p.coalesce_grad_reduction),
        ),
        Rule(
            "self.gradientCheckpointing || !self.offloadActivations",
            "offloadActivations needs gradientCheckpointing: it offloads the activations that checkpointing keeps",
            lambda p: p.gradient_checkpointing or not p.offload_activations,
        ),
        Rule(
            "self.optimizerDtype == 'float32' || self.offloadOptimizer != 'cpu'",
            "optimizerDtype bfloat16 and int8 need offloadOptimizer none or generating: AdamW on CPUs keeps float32",
            lambda p: p.optimizer_dtype == "float32" or p.offload_optimizer != "cpu",
        ),
    )

    zero_stage: Annotated[Literal[0, 1, 2, 3], INTEGERS] = Field(
        2,
        description="ZeRO stage: what is partitioned over the ranks. 0: nothing. 1: optimizer states. 2: also "
        "gradients. 3: also weights.",
    )
    offload_optimizer: Literal["none", "cpu", "generating"] = Field(
        "none",
        description="Place of optimizer states. none: on the GPU. cpu: in host memory, where the CPU updates them. "
        "generating: on the GPU for the optimizer's update and in host memory for the rest of the step, which "
        "then has more GPU memory (topology Colocate only).",
    )
    optimizer_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        "float32",
        description="Type of AdamW's states. Set int8 where float32 does not fit: moments take a quarter, and the "
        "weights that AdamW updates stay float32. bfloat16 halves both, and loses updates below 1/256 of a weight.",
    )
    coalesce_grad_reduction: bool = Field(
        False,
        description="Reduce gradients once a step, not after every micro-batch. Set it where the network is slow. "
        "Less traffic, but every rank holds all gradients until then.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    offload_activations: bool = Field(
        False,
        description="With gradientCheckpointing: keep the activations that checkpointing saves in host memory until "
        "the backward pass. Set it where long completions do not fit otherwise. A rank "
        "needs 2 bytes x layers x hidden size of host memory for each token of a micro-batch.",
    )
    sequence: int = Field(
        1,
        ge=1,
        le=64,
        description="Neighbouring trainer GPUs that share each sequence. Set it where long ones do not fit on one.",
    )
