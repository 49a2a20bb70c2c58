"""Findings of an attempt's trials, kept so that later attempts of the run need not try the same again.

A trial ends as it did before if all that it depends on is the same: settings, our own sources, versions of packages,
devices. So what was found is kept in the run's folder, together with a digest of these.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import grpo_workload
from grpo_spec.contract import Contract, Device
from grpo_workload.pod.versions import TRIED, installed
from grpo_workload.ranks.collectives import gather, on_main

logger = logging.getLogger(__name__)

FILE_NAME = "trials.json"
SOURCES = Path(grpo_workload.__file__).parent


@dataclass(frozen=True, slots=True)
class Found:
    """Findings of an attempt after the policy's trial."""

    tokens: int  # of a micro-batch
    prompt_tokens: int  # of the longest prompt, with which the longest sequence was tried; 0 without a GPU


@dataclass(frozen=True, slots=True)
class Trials:
    """The trials of a run; made by `read_trials`."""

    path: Path
    conditions: str
    found: Found | None  # by an earlier attempt; None if this one has to try

    def tokens(self, prompt_tokens: int) -> int | None:
        """Return the size of micro-batches that was settled with prompts as long as these, or longer ones."""
        return self.found.tokens if self.found is not None and self.found.prompt_tokens >= prompt_tokens else None

    def keep(self, found: Found) -> None:
        """Keep what this attempt has found; collective. Where it cannot be written, the next attempt tries again."""
        if found != self.found:
            on_main(lambda: self._write(found))

    def _write(self, found: Found) -> None:
        content = {"tokens": found.tokens, "promptTokens": found.prompt_tokens, "conditions": self.conditions}
        # An attempt on a node that is cut off may write at the same time: what it says is as true, if it is whole.
        fresh = self.path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(content))
            fresh.replace(self.path)
        except OSError as error:
            logger.warning("what the trials have found is not kept for later attempts: %s", error)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)


def read_trials(contract: Contract, run_dir: Path) -> Trials:
    """Return what an earlier attempt of the run has found under the same conditions, if one has; collective."""
    path, conditions = run_dir / FILE_NAME, _conditions(contract, gather(_device(contract.device)))
    return Trials(path, conditions, on_main(lambda: _read(path, conditions)))


def _read(path: Path, conditions: str) -> Found | None:
    try:
        content = json.loads(path.read_text())
        return Found(content["tokens"], content["promptTokens"]) if content["conditions"] == conditions else None
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged: it is tried again
        return None


def _conditions(contract: Contract, devices: list[str]) -> str:
    versions = {package: installed(package) for package in TRIED[contract.device]}
    parts = [contract.config.model_dump(mode="json"), contract.micro_batch_halvings, devices, versions]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for path in sorted(SOURCES.rglob("*.py")):  # another image may have the same tag
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _device(device: Device) -> str:
    if device is not Device.CUDA:
        return str(device)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory} bytes"
