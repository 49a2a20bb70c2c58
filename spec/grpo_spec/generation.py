"""The section `generation`: what samples completions, and how. Torch-free: the operator imports it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from grpo_spec.schema import INTEGERS, Section, Size, in_bytes


class Topology(StrEnum):
    """The place of vLLM relative to the trainer."""

    COLOCATE = "Colocate"
    SERVER = "Server"
    NODE_LOCAL = "NodeLocal"


class ColocateConfig(Section):
    """vLLM inside the trainer's ranks."""

    sleep_level: Annotated[Literal[0, 1, 2], INTEGERS] = Field(
        2,
        description="What vLLM releases while the trainer trains. 0: nothing. 1: the KV cache, and its weights move to "
        "host memory. 2: the KV cache and its weights.",
    )


class GenerationConfig(Section):
    """The sampler of completions, and its settings."""

    topology: Topology = Field(
        Topology.COLOCATE,
        description="Place of vLLM. Colocate: inside the trainer's ranks. Server: on its own pods. NodeLocal: in "
        "each trainer pod, on GPUs set aside for it.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Number of GPUs over which generation splits one copy of the model."
    )
    engine: Literal["vLLM", "Transformers"] = Field(
        "vLLM",
        description="vLLM, or Transformers: plain generate(). Set Transformers for debugging and on machines that "
        "cannot run vLLM.",
    )
    max_model_len: int | None = Field(
        None, ge=8, le=10_485_760, description="Maximum number of tokens in a prompt and its completion together."
    )
    kv_cache_memory: Size | None = Field(
        None,
        description="Size of the KV cache of each vLLM worker (one worker per GPU), for example 4Gi. Takes precedence "
        "over gpuMemoryUtilization.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=0.9,
        description="Share of a GPU's memory that vLLM uses when kvCacheMemory is not set, and that must be free when "
        "it starts. Default: 0.9 with Server and NodeLocal; with Colocate what the trainer leaves, or 0.3 with "
        "sleepLevel 0 and on CPUs.",
    )
    engine_args: dict[Annotated[str, Field(max_length=64)], JsonValue] = Field(
        default_factory=dict, max_length=64, description="Further arguments of vLLM's engine, under vLLM's own names."
    )
    tool_call_parser: Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9_]+$")] | None = Field(
        None,
        description="Name of vLLM's tool parser that reads the model's calls, for example hermes. Default: the one "
        "that reads back what the chat template writes. Set it where several do, and the log names the wrong one.",
    )
    colocate: ColocateConfig | None = Field(None, description="Settings of the topology Colocate.")

    @property
    def is_split_over_ranks(self) -> bool:
        """Whether several ranks of the trainer together hold one copy of the model for generation."""
        return self.topology is Topology.COLOCATE and self.tensor_parallel > 1

    @property
    def sleep_level(self) -> int:
        """The sleep level of vLLM: the memory that a colocated engine releases while the trainer trains."""
        return (self.colocate or ColocateConfig()).sleep_level

    @property
    def is_quantized(self) -> bool:
        """Whether vLLM quantizes the weights that it gets."""
        return self.engine_args.get("quantization") is not None

    @property
    def python_args(self) -> dict[str, JsonValue]:
        """`engineArgs` by the names that vLLM's Python has for them; its command line has them with dashes."""
        return {name.replace("-", "_"): value for name, value in self.engine_args.items()}

    @property
    def is_coarser(self) -> bool:
        """Whether vLLM rounds weights or its cache more than the trainer does its own numbers."""
        return self.is_quantized or self.python_args.get("kv_cache_dtype", "auto") != "auto"

    @property
    def takes_rest(self) -> bool:
        """Whether vLLM's cache takes what the trainer leaves of a GPU: it sleeps while the trainer needs more."""
        sized = self.kv_cache_memory is not None or self.gpu_memory_utilization is not None
        sleeps = self.topology is Topology.COLOCATE and self.engine == "vLLM" and self.sleep_level > 0
        return sleeps and not sized

    @property
    def gpu_share(self) -> float:
        """Share of a GPU's memory that vLLM uses when its cache has no size in bytes, and does not take the rest."""
        return self.gpu_memory_utilization or (0.3 if self.topology is Topology.COLOCATE else 0.9)

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kvCacheMemory` in bytes."""
        return None if self.kv_cache_memory is None else in_bytes(self.kv_cache_memory)
