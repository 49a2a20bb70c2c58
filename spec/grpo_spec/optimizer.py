"""Settings of AdamW and of its learning rate. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from grpo_spec.schema import Rule, Section

INT8_MOMENTS = 2 * (1 + 4 / 256)
"""Bytes of both of AdamW's moments for each parameter in 8 bits: 256 elements share a constant of four bytes."""

SCHEDULE_ARGUMENTS = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "min_lr_ratio", "num_cycles"),
}
"""Transformers' schedules that follow no metric, and the numbers that each takes; a test compares with transformers."""

_LISTED = {schedule: list(names) for schedule, names in SCHEDULE_ARGUMENTS.items()}
_ALLOWED = "; ".join(f"{', '.join(names)} with {schedule}" for schedule, names in SCHEDULE_ARGUMENTS.items() if names)
_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


class OptimizerConfig(Section):
    """The part of `spec.training` that is about the optimizer. Field names are those of transformers' arguments."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.lrSchedulerType != 'constant' || self.warmupSteps == 0",
            "lrSchedulerType constant has no warm-up; constant_with_warmup has",
            lambda o: o.lr_scheduler_type != "constant" or o.warmup_steps == 0,
        ),
        Rule(  # one for all, because the API server checks it at each write of a job's status too
            "!has(self.lrSchedulerKwargs) || self.lrSchedulerKwargs.all(name, "
            f"name in {_LISTED}[self.lrSchedulerType])",
            f"lrSchedulerKwargs may be {_ALLOWED}; other values of lrSchedulerType take none",
            lambda o: set(o.lr_scheduler_kwargs) <= set(SCHEDULE_ARGUMENTS[o.lr_scheduler_type]),
        ),
        Rule(
            f"!(self.lrSchedulerType in {list(_MIN_LR)}) || has(self.lrSchedulerKwargs) && "
            "('min_lr' in self.lrSchedulerKwargs) != ('min_lr_rate' in self.lrSchedulerKwargs)",
            "this lrSchedulerType needs lrSchedulerKwargs.min_lr, or min_lr_rate, a share of learningRate",
            lambda o: (
                o.lr_scheduler_type not in _MIN_LR
                or ("min_lr" in o.lr_scheduler_kwargs) != ("min_lr_rate" in o.lr_scheduler_kwargs)
            ),
        ),
        Rule(
            "self.lrSchedulerType != 'warmup_stable_decay' || "
            "has(self.lrSchedulerKwargs) && 'num_decay_steps' in self.lrSchedulerKwargs",
            "lrSchedulerType warmup_stable_decay needs lrSchedulerKwargs.num_decay_steps",
            lambda o: o.lr_scheduler_type != "warmup_stable_decay" or "num_decay_steps" in o.lr_scheduler_kwargs,
        ),
    )

    learning_rate: float = Field(1e-6, gt=0, le=1, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = Field("linear", description="Schedule of the learning rate, by transformers' name.")
    lr_scheduler_kwargs: dict[Annotated[str, Field(max_length=32)], Annotated[float, Field(ge=0, le=1_000_000_000)]] = (
        Field(
            default_factory=dict,
            max_length=8,
            description="Arguments of the schedule, under transformers' names. Set it with schedules that need some: "
            "cosine_with_min_lr needs min_lr_rate or min_lr, warmup_stable_decay needs num_decay_steps.",
        )
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Number of steps over which the learning rate rises to its peak. Set it, for example 10, where "
        "rewards fall in the first steps.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Weight decay of AdamW; as in TRL, norms and biases do not decay. Set it, for example 0.01, to "
        "keep weights small over long runs.",
    )
    adam_beta1: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="AdamW's beta1, of the mean of gradients. Change it to repeat a run of another trainer.",
    )
    adam_beta2: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="AdamW's beta2, of the mean of their squares. Lower it, for example to 0.95, where the size of "
        "gradients (grad_norm) changes much from step to step.",
    )
    adam_epsilon: float = Field(
        1e-8,
        gt=0,
        le=1,
        description="AdamW's epsilon. Lower it, for example to 1e-15, where gradients are so small that it holds "
        "updates back.",
    )
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Gradients are clipped to this norm. Lower it where rewards fall after single steps with a large "
        "grad_norm.",
    )
