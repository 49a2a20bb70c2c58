"""Write the generated parts of docs/memory.md: plans of large jobs, and plans beside recorded peaks of memory.

python -m benchmarks.training.memory_page
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS, lengths, lognormal
from benchmarks.common.models import config_of
from grpo_cli.local.edited import contract_of
from grpo_cli.screen.memory_plan import table
from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.job import Job
from grpo_spec.gpus import gpu_bytes
from grpo_workload.capacity.parts import TRAIN, UPDATE
from grpo_workload.capacity.plan import Plan, plan
from grpo_workload.capacity.shapes import Models
from grpo_workload.policy.model import tiles
from grpo_workload.policy.model.replacing import replaced

PAGE = ROOT / "docs/memory.md"
RESULTS = ROOT / "benchmarks/results"
CONFIGS = ROOT / "tests/unit/workload/capacity/configs"
GIB = 2**30
BESIDE_TORCH = ("CUDA context", "NCCL", "engine profile")
EACH = PROMPT_TOKENS + 512  # tokens of a sequence of equal length
MICRO = 8  # sequences of a micro-batch


class Recorded(NamedTuple):
    """A peak that a benchmark stored, and the job that it ran."""

    what: str
    file: str
    peak: Callable[[list[dict[str, Any]]], float]  # GiB
    tokens: int  # of the largest micro-batch
    settings: dict[str, Any]  # of the job
    leaves_out: tuple[str, ...] = ()  # parts that the recorded figure does not have


def _row(name: str, key: str = "memory_gib") -> Callable[[list[dict[str, Any]]], float]:
    return lambda lines: max(float(line[key]) for line in lines if line["row"] == name)


def _compiled(kind: str, of: str) -> Callable[[list[dict[str, Any]]], float]:
    return lambda lines: next(float(line[of]["peak_gib"]) for line in lines if line["kind"] == kind)


def _server(lines: list[dict[str, Any]]) -> float:
    rows = [line["mean"] for line in lines if line["row"] == "server:lognormal:0"]
    return max(float(mean["ranks/memory_allocated_peak/max"]) for mean in rows) / GIB


def _largest_of(drawn: list[int]) -> int:
    sizes = [PROMPT_TOKENS + length for length in drawn]
    return max(sum(sizes[first : first + MICRO]) for first in range(0, len(sizes), MICRO))


DRAWN = sum(PROMPT_TOKENS + length for length in lengths("lognormal"))
PASSES = (*BESIDE_TORCH, "moments")  # no optimizer step was taken
PLAIN = {"model": {"useLigerKernel": False}}
RECORDED = (
    Recorded("passes, equal lengths", "layer_compile_h200", _compiled("liger", "equal"), MICRO * EACH, {}, PASSES),
    Recorded("the same without Liger", "layer_compile_h200", _compiled("plain", "equal"), MICRO * EACH, PLAIN, PASSES),
    Recorded(
        "passes, log-normal lengths",
        "layer_compile_h200",
        _compiled("liger", "lognormal"),
        _largest_of(lognormal(64)),
        {},
        PASSES,
    ),
    Recorded(
        "the same without Liger",
        "layer_compile_h200",
        _compiled("plain", "lognormal"),
        _largest_of(lognormal(64)),
        PLAIN,
        PASSES,
    ),
    Recorded("Colocate, micro-batches of 8, H200", "trainer_h200", _row("ours-equal"), MICRO * EACH, {}),
    Recorded("Colocate, whole step, H100", "trainer_h100", _row("ours-equal-default"), 64 * EACH, {}),
    Recorded("the same, log-normal lengths", "trainer_h100", _row("ours-lognormal-default"), DRAWN, {}),
    Recorded("Colocate, whole step, vLLM 0.33", "trainer_h100_vllm033", _row("ours-equal-default"), 64 * EACH, {}),
    Recorded("the same, log-normal lengths", "trainer_h100_vllm033", _row("ours-lognormal-default"), DRAWN, {}),
    Recorded("Server, whole step, log-normal, H100", "staleness_h100", _server, DRAWN, {}, BESIDE_TORCH),
)
"""All of 1.5B (Qwen2's shape), ZeRO-0, states in bfloat16, gradient checkpointing. Colocate: what the driver counts
while the engine sleeps; passes and Server: what torch allocates."""


def planned_bytes(recorded: Recorded, models: Models, folder: Path) -> int:
    """Return what is planned in place of a recorded figure."""
    config_of("qwen2", "1.5", max_position_embeddings=4096).save_pretrained(folder)
    is_whole = recorded.tokens in (64 * EACH, DRAWN)
    fields = {
        "model": {"path": str(folder)} | recorded.settings.get("model", {}),
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {
            "promptsPerStep": NUM_PROMPTS,
            "numGenerations": NUM_GENERATIONS,
            "maxCompletionLength": 256,
            "maxTokensPerMicroBatch": recorded.tokens,
            "importanceSamplingCorrection": "none",
        },
        "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True},
        # A step of whole micro-batches has as many tokens as were recorded; else gradients exist before.
        "generation": {"maxModelLen": max(257, recorded.tokens // 64) if is_whole else EACH},
        "trainer": {"groups": [{"name": "a", "gpus": 1}]},
    }
    with replaced((tiles, "TILE", recorded.tokens)):  # they ran before MLPs had tiles
        found = plan(contract_of(_job(fields)), gpu_bytes("h100"), models)
    return sum(size for name, size in found.gpus[0].phases[TRAIN].items() if name not in recorded.leaves_out)


def recorded_rows() -> Iterator[tuple[Recorded, float, float]]:
    """Yield each recorded figure with its plan and itself, in GiB."""
    models = Models()
    with tempfile.TemporaryDirectory() as folder:
        for one in RECORDED:
            lines = [json.loads(line) for line in (RESULTS / f"{one.file}.jsonl").read_text().splitlines()]
            yield one, planned_bytes(one, models, Path(folder)) / GIB, one.peak(lines)


JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("qwen2.5-72b", "h100", {}),
    "experts": (
        "qwen3-30b-a3b",
        "h200",
        {
            "trainer": {"groups": [{"name": "node", "gpus": 8}]},
            "parallelism": {"zeroStage": 3, "gradientCheckpointing": True},
            "generation": {"tensorParallel": 2, "maxModelLen": 8192},
            "training": {"maxCompletionLength": 4096},
        },
    ),
    "large": (
        "qwen3-235b-a22b",
        "h200",
        {
            "trainer": {"groups": [{"name": "node", "replicas": 8, "gpus": 8}]},
            "parallelism": {"zeroStage": 3, "gradientCheckpointing": True},
            "generation": {
                "topology": "Server",
                "maxModelLen": 8192,
                "server": {"groups": [{"name": "engine", "replicas": 2, "gpus": 8, "tensorParallel": 8}]},
            },
            "training": {"maxCompletionLength": 4096},
            "storage": {"claimName": "runs"},
        },
    ),
}


SHARED: dict[str, Any] = {
    "dataset": {"path": "/data"},
    "rewards": [{"name": "accuracy", "accuracy": {}}],
    "training": {"promptsPerStep": 64, "maxCompletionLength": 2048},
    "parallelism": {"zeroStage": 3, "gradientCheckpointing": True},
    "storage": {"claimName": "runs"},
}
_SPLIT, _ENGINE = {"tensorParallel": 4, "maxModelLen": 4096}, {"name": "e", "gpus": 8, "tensorParallel": 8}
_SERVER = {"topology": "Server", "maxModelLen": 4096, "server": {"groups": [_ENGINE]}}
INT8: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("32B, 4 H100", "qwen2.5-32b", "h100", {"generation": _SPLIT, "trainer": {"groups": [{"name": "t", "gpus": 4}]}}),
    ("32B, 4 H200", "qwen2.5-32b", "h200", {"generation": _SPLIT, "trainer": {"groups": [{"name": "t", "gpus": 4}]}}),
    ("32B, 8 H100", "qwen2.5-32b", "h100", {"generation": _SPLIT, "trainer": {"groups": [{"name": "t", "gpus": 8}]}}),
    (
        "72B, 16 H100, and 8 that sample",
        "qwen2.5-72b",
        "h100",
        {"generation": _SERVER, "trainer": {"groups": [{"name": "t", "gpus": 8, "replicas": 2}]}},
    ),
)


def planned_job(name: str) -> Plan:
    """Return the plan of one of `JOBS`."""
    import yaml

    model, gpu, settings = JOBS[name]
    fields = {"dataset": {"path": "/data"}, "rewards": [{"name": "accuracy", "accuracy": {}}]} | settings
    if not settings:
        fields = yaml.safe_load((ROOT / "examples/colocate-72b-zero3-offload.yaml").read_text())["spec"]
    fields["model"] = {"path": str(CONFIGS / model)}
    return plan(contract_of(_job(fields)), gpu_bytes(gpu), Models(), engine_bytes=gpu_bytes(gpu))


def fill(text: str) -> str:
    """Return the page with what is between `<!-- generated: NAME -->` and `<!-- end -->` replaced."""

    def part(found: re.Match[str]) -> str:
        tables = {"recorded": _recorded_table, "capacity": _capacity_table, "int8": _int8_table}
        made = tables[found[1]]() if found[1] in tables else _plan_tables(found[1])
        return f"<!-- generated: {found[1]} -->\n\n{made}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def _recorded_table() -> str:
    rows = ["| | tokens | planned | measured | off | raw values |", "|---|---:|---:|---:|---:|---|"]
    for one, made, real in recorded_rows():
        source = f"[{one.file}](../benchmarks/results/{one.file}.jsonl)"
        off = f"{(made / real - 1) * 100:+.1f}%"
        rows.append(f"| {one.what} | {one.tokens:,} | {made:.2f} GiB | {real:.2f} GiB | {off} | {source} |")
    return "\n".join(rows)


def _capacity_table() -> str:
    rows = ["| model | tokens | settings | planned | measured | off |", "|---|---:|---|---:|---:|---:|"]
    for line in (RESULTS / "capacity_h100.jsonl").read_text().splitlines():
        one = json.loads(line)
        settings = [f"`{name}: {value}`" for name, value in {**one["parallelism"], **(one["lora"] or {})}.items()]
        model, made, real = f"{one['size']}B {one['family']}", one["planned_gib"], one["allocated_gib"]
        cells = [model, f"{one['tokens']:,}", ", ".join(settings), f"{made:.2f} GiB", f"{real:.2f} GiB"]
        rows.append(f"| {' | '.join(cells)} | {one['off'] * 100:+.1f}% |")
    return "\n".join(rows).replace(": True`", ": true`")


def _int8_table() -> str:
    rows = ["| | `optimizerDtype` | optimizer step | largest phase | |", "|---|---|---:|---:|---|"]
    models = Models()
    for what, model, gpu, fields in INT8:
        for dtype in ("float32", "int8"):
            made = SHARED | {"parallelism": {**SHARED["parallelism"], "optimizerDtype": dtype}, **fields}
            made["model"] = {"path": str(CONFIGS / model)}
            found = plan(contract_of(_job(made)), gpu_bytes(gpu), models, engine_bytes=gpu_bytes(gpu))
            rank = found.gpus[0]
            step, most = sum(rank.phases[UPDATE].values()) / GIB, rank.peak / GIB
            rows.append(f"| {what} | {dtype} | {step:.1f} GiB | {most:.1f} GiB | {_verdict(found)} |")
    return "\n".join(rows)


def _verdict(found: Plan) -> str:
    return "fits" if found.is_safe else "fits, but tightly" if found.fits else "does not fit"


def _plan_tables(name: str) -> str:
    found = planned_job(name)
    tables = [
        "\n".join(
            line.rstrip()
            for line in table({"name": one.name, "isHost": one.is_host, "phases": one.phases, "limit": one.limit})
        )
        for one in found.places
    ]
    return "```\n" + "\n\n".join([*tables, f"micro-batch  {found.tokens} tokens; {_verdict(found)}"]) + "\n```"


def _job(fields: dict[str, Any]) -> Job:
    return Job(namespace="default", name="job", uid="job", generation=1, spec=parse_spec(fields))


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
