"""The section `lora`: the adapters that a job trains. Torch-free: the operator imports it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_spec.schema import Rule, Section

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM supports (`MaxLoRARanks` in vllm/config/lora.py)."""

ALL_LINEAR = "all-linear"

ModuleName = Annotated[str, Field(min_length=1, max_length=128)]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685). Only they are trained; the model's own weights do not change.

    Field names are peft's.
    """

    RULES = (
        Rule(
            f"!has(self.targetModules) || self.targetModules.size() == 1 || !('{ALL_LINEAR}' in self.targetModules)",
            f"targetModules must be either {ALL_LINEAR} or names of modules: remove one or the other",
            lambda c: len(c.target_modules) == 1 or ALL_LINEAR not in c.target_modules,
        ),
        Rule(
            "!has(self.modulesToSave) || !has(self.targetModules) || "
            "self.modulesToSave.all(m, !(m in self.targetModules))",
            "a module must not be in both targetModules and modulesToSave: remove it from one of them",
            lambda c: not set(c.modules_to_save) & set(c.target_modules),
        ),
        Rule(
            "self.push == 'merged' || !has(self.modulesToSave) || self.modulesToSave.size() == 0",
            "push adapters cannot send modulesToSave: use push merged, or leave modulesToSave empty",
            lambda c: c.push == "merged" or not c.modules_to_save,
        ),
        Rule(
            "!has(self.path) || "
            "(self.push == 'merged' && (!has(self.modulesToSave) || self.modulesToSave.size() == 0))",
            "path needs push merged, whose engines need not know the adapters' r, and modulesToSave empty",
            lambda c: c.path is None or (c.push == "merged" and not c.modules_to_save),
        ),
        Rule(
            f"self.push == 'merged' || self.r <= {ADAPTER_RANKS[-1]}",
            f"push adapters needs r of at most {ADAPTER_RANKS[-1]}, vLLM's largest rank; push merged takes any",
            lambda c: c.push == "merged" or c.r <= ADAPTER_RANKS[-1],
        ),
        Rule(
            "self.push == 'merged' || !self.loadIn4Bit",
            "loadIn4Bit needs push merged: with push adapters, engines would add them to weights that are not rounded "
            "to 4 bits, and sample from another model than the one that is trained",
            lambda c: c.push == "merged" or not c.load_in_4bit,
        ),
    )

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="Folder inside the container with adapters of peft for this model, with which training begins: "
        "those of supervised fine-tuning, or step-N/model of another run. They keep their own r, alpha and modules; "
        "these fields have no effect. Default: new adapters, which change nothing at first.",
    )
    r: int = Field(16, ge=1, le=4096, description="Rank of the adapters.")
    alpha: float = Field(32, gt=0, le=65536, description="What an adapter adds to its layer is scaled by alpha / r.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout of the adapters' inputs, in training only. Raise it, for example to 0.05, where few rows "
        "are repeated often and evaluations stay behind training.",
    )
    target_modules: tuple[ModuleName, ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        max_length=64,
        description=f"Linear layers that get an adapter, by the end of their names; {ALL_LINEAR} means all but the "
        "output layer. Set it to train fewer, with less memory.",
    )
    modules_to_save: tuple[ModuleName, ...] = Field(
        (),
        max_length=64,
        description="Modules whose own weights are trained as well, by the end of their names. Set it, for example "
        "[lm_head], where adapters are not enough.",
    )
    load_in_4bit: bool = Field(
        False,
        description="QLoRA: while training, the linear layers' own weights are in 4 bits (NF4 of bitsandbytes). "
        "Set it for GPUs that do not hold the model in 16 bits. They take a quarter of the "
        "memory, and passes are slower. Engines get the rounded weights, in model.dtype.",
    )
    push: Literal["merged", "adapters"] = Field(
        "merged",
        description="Weights that engines get after a step. merged: full weights; they sample as fast as without LoRA. "
        "adapters: only the adapters, in a fraction of the time, but vLLM then computes them in addition to each "
        "layer (topologies Server and NodeLocal only). Set adapters where a push takes much of a step (time/sync).",
    )

    @property
    def vllm_rank(self) -> int:
        """Smallest adapter rank that vLLM supports and that is at least `r`. For pushed adapters only."""
        return next(rank for rank in ADAPTER_RANKS if rank >= self.r)
