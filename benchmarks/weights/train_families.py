"""Families of models on one device, trained: two optimizer steps, each pushed to the engine and checked.

    python -m benchmarks.weights.train_families --device cpu --output benchmarks/results/train_families_cpu.jsonl
    python -m benchmarks.weights.train_families --device cuda --engine vLLM --at-once 8 --minutes 8 --output h100.jsonl

Models are those of tests/support/families.py, with random weights: bfloat16 on a GPU, and with vLLM on a CPU where
layers have a gated delta net; else float32. Families that many use come first. A line is of one family, engine and
mode, which is the stage of ZeRO and what is trained; tests/trainer/programs/family_steps.py says what it holds, and
what it compares. A line has the error where that failed. Lines that --output has of these versions are not measured
again; others are replaced.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import click
import torch

from benchmarks import ROOT
from benchmarks.common.runs import about
from benchmarks.weights.family_sizes import GATED_DELTA_NET, LONGER, ON_A_GPU, SIZES
from support.families import FAMILIES, MASKED, STATEFUL, make_model
from support.trainer.only_rank import only_rank
from support.trainer.tiny_model import make_tiny_tokenizer

PROGRAMS = ROOT / "tests" / "trainer" / "programs"
MODES = ("3:full", "3:lora", "0:full", "0:lora", "2:full", "2:lora")
ENGINES = ("Transformers", "vLLM")
FIRST = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3"),
    *("gpt_oss", "deepseek_v3", "glm4_moe", "olmo2", "granite", "smollm3", "qwen3_next", "qwen3_5", "glm4"),
    *("deepseek_v2", "gemma3", "qwen3_5_moe", "lfm2", "falcon_h1", "granitemoehybrid", "seed_oss", "exaone4", "olmo3"),
)
_storing = Lock()
TOGETHER = 8  # families in one process without vLLM
ERROR = re.compile(r"^(?:\[rank0\]: )?(?:\w+\.)*(\w+(?:Error|Exception): .*)$", re.MULTILINE)
ERROR_CHARS = 400


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--family", "families", multiple=True, help="All that are tested, if not given.")
@click.option("--engine", "engines", type=click.Choice(ENGINES), multiple=True, default=ENGINES, show_default=True)
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES, show_default=True)
@click.option("--at-once", default=1, show_default=True, help="Processes side by side.")
@click.option("--timeout", default=300, show_default=True, help="Longest time for one process, in seconds.")
@click.option("--minutes", default=math.inf, help="Time for all; what is not done by then is listed.")
@click.option("--again", is_flag=True, help="Also measure what --output has.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("train_families.jsonl"), show_default=True)
def main(
    device: str,
    families: tuple[str, ...],
    engines: tuple[str, ...],
    modes: tuple[str, ...],
    at_once: int,
    timeout: int,
    minutes: float,
    again: bool,
    output: Path,
) -> None:
    """Train each family in each mode with each engine, and store a line for each."""
    head = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    head |= about("benchmarks.weights.train_families", device=device)
    known = set() if again else {_key(row) for row in _read(output) if head.items() <= row.items()}
    names = families or tuple(dict.fromkeys((*FIRST, *FAMILIES, *STATEFUL, *MASKED)))
    ends = time.monotonic() + 60 * minutes
    left: list[str] = []

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(at_once) as threads:

        def train(engine: str, names: tuple[str, ...]) -> None:
            missing = [(family, mode) for family in names for mode in modes if (family, mode, engine) not in known]
            trainer = Trainer(Path(scratch), device, engine)
            while missing and (seconds := ends - time.monotonic()) > 0:
                lines = trainer.run(missing, min(timeout, seconds))
                if time.monotonic() > ends:  # what failed had less than its time
                    lines = [line for line in lines if "error" not in line]
                for line in lines:
                    missing.remove((line["family"], line["mode"]))
                    print(line, flush=True)
                    _store(output, line | head)
            left.extend(f"{family} {mode} with {engine}" for family, mode in missing)

        # A vLLM has one model. Without it, the imports take longer than the steps.
        size = {"vLLM": 1, "Transformers": TOGETHER}
        shares = [(engine, at, size[engine]) for engine in engines for at in range(0, len(names), size[engine])]
        for done in [threads.submit(train, engine, names[at : at + length]) for engine, at, length in shares]:
            done.result()
    if left:
        print(f"not run in {minutes:g} minutes: {', '.join(left)}")


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["family"], row["mode"], row["engine"]


def _read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def _store(output: Path, line: dict[str, Any]) -> None:
    """Write a line in place of the one that was there; it is on the disk when this returns."""
    with _storing:
        rows = [row for row in _read(output) if _key(row) != _key(line)]
        written = output.with_suffix(".new")
        written.write_text("".join(json.dumps(row) + "\n" for row in (*rows, line)))
        written.rename(output)


class Trainer:
    """Trains families with one engine."""

    _seeding = Lock()  # the global generator of random numbers makes the weights

    def __init__(self, scratch: Path, device: str, engine: str) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._device, self._engine = device, engine
        self._last = ("", "")  # family and error

    def run(self, wanted: list[tuple[str, str]], timeout: float) -> list[dict[str, Any]]:
        """Train `wanted`, families and modes, in one process; return the lines of what is through.

        If nothing is, that of the first, which failed: what fails behind others may owe it to them, and is tried again.
        Also those of the family's other modes, if it failed as the mode before did.
        """
        results = self._folder / "lines.jsonl"
        results.unlink(missing_ok=True)
        models: dict[str, dict[str, Any]] = {}
        for family, mode in wanted:
            if family not in models:
                try:
                    models[family] = self._model(family)
                except Exception as error:  # transformers does not have it
                    if not models:
                        return [self._line(family, mode, error=f"{type(error).__name__}: {error}"[:ERROR_CHARS])]
                    break
            models[family]["modes"].append(mode)
        command = ["family_steps.py", self._device, self._engine, json.dumps([*models.values()])]
        failed, _ = run_alone(command, self._folder, timeout)
        done = [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []
        lines = [self._line(line.pop("model"), line.pop("mode"), **line) for line in done]
        if lines:
            self._last = "", ""
        elif failed:
            (family, mode), *others = wanted
            lines.append(self._line(family, mode, **failed))
            if self._last == (family, failed["error"]):
                again = {"error": f"not tried after two modes: {failed['error']}"}
                lines += [self._line(family, other, **again) for name, other in others if name == family]
            self._last = family, failed["error"]
        return lines

    def _line(self, family: str, mode: str, **found: Any) -> dict[str, Any]:
        return {"family": family, "engine": self._engine, "mode": mode, **found}

    def _model(self, family: str) -> dict[str, Any]:
        """Return the model with what its job needs, for the program."""
        folder = self._folder / family
        if not folder.exists():
            fields = SIZES | ON_A_GPU.get(family, {}) if self._device == "cuda" else {}
            fields |= LONGER.get(family, {})
            tokenizer = make_tiny_tokenizer()
            ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
            # vLLM's kernels of the gated delta net on CPUs take no other type than bfloat16.
            is_half = self._device == "cuda" or (family in GATED_DELTA_NET and self._engine == "vLLM")
            with Trainer._seeding:
                model = make_model(family, whole=True, **fields, **ids)
            model.to(torch.bfloat16 if is_half else torch.float32).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        kernels = {"gdn_prefill_backend": "triton"}  # FlashInfer would compile its own for minutes
        return {
            "path": str(folder),
            "modes": [],
            "model": {"attention": "eager"} if family in MASKED else {},
            "training": {} if family in FAMILIES else {"perDeviceTrainBatchSize": 1},
            "engineArgs": kernels if self._device == "cuda" and family in GATED_DELTA_NET else {},
        }


def run_alone(command: list[str], folder: Path, timeout: float) -> tuple[dict[str, Any], str]:
    """Run one of PROGRAMS as the only rank; return its error, if there is one, and its output.

    Args:
        command: name of the program and its arguments.
        folder: where the model is and the program writes its result.
        timeout: in seconds.
    """
    # Models are so small that several threads only wait for each other.
    env = os.environ | only_rank() | {"RESULTS": str(folder), "OMP_NUM_THREADS": "1"}
    program, *arguments = command
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / program), *arguments],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout:.0f} s"}, ""
    if done.returncode == 0:
        return {}, done.stdout
    errors = ERROR.findall(done.stderr) or [f"exit code {done.returncode}"]
    named = [error for error in errors if error.startswith("ConfigError")]  # others are its cause, or follow from it
    return {"error": (named or errors)[0].replace(str(folder), "")[:ERROR_CHARS]}, done.stdout


if __name__ == "__main__":
    main()
