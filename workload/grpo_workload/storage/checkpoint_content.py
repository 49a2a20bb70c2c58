"""The content of a checkpoint.

    step-N/  model/         for from_pretrained: config, safetensors, tokenizer; with LoRA, peft's adapters alone
             deepspeed/     optimizer state and master weights, one part per rank
             reference/     the reference model, if it followed the policy (`training.syncRefModel`)
             trainer.json   `SavedState`
             manifest.json  every file's size and checksum

Random states are not saved: they are seeded from the run's seed, the step and the prompt (`ranks.seeds`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from json import dumps, loads
from pathlib import Path
from typing import Any

from grpo_workload.data.origin import DataOrigin
from grpo_workload.storage.base_model import Origin

MODEL = "model"
DEEPSPEED = "deepspeed"
REFERENCE = "reference"
STATE = "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state that a run needs to resume, in addition to weights and optimizer state."""

    step: int  # optimizer steps taken
    weight_version: int
    num_tokens: int  # tokens of prompts and completions since the run began
    world_size: int
    zero_stage: int
    optimizer_dtype: str = "float32"  # `parallelism.optimizerDtype`; those of earlier releases: not int8
    lora: dict[str, Any] | None = None  # `TrainerConfig.adapters`
    origin: Origin | None = None  # base model that the run began with
    data: dict[str, DataOrigin] = field(default_factory=dict)  # its datasets, by field; those of earlier releases: none

    @classmethod
    def read(cls, path: Path) -> SavedState:
        """Read the file that `write` wrote."""
        raw = loads(path.read_text())
        data = {name: DataOrigin(**origin) for name, origin in raw.get("data", {}).items()}
        return cls(**raw | {"origin": raw["origin"] and Origin(**raw["origin"]), "data": data})

    def write(self, path: Path) -> list[Path]:
        """Write the file, and return what was written."""
        path.write_text(dumps(asdict(self)))
        return [path]
