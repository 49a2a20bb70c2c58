"""Pushing LoRA's weights from ZeRO-3 to an engine, our trainer and TRL's: seconds, and extra GPU memory on a rank.

    python -m benchmarks.weights.lora_sync --side ours --push adapters --output lora_sync.jsonl

Three ranks (or --ranks) and one vLLM server, a GPU each; a random Qwen2 of SIZE billion parameters with adapters on
all linear layers. The timed call is the one by which each trainer brings its engine up to date, on every rank; extra
memory is PyTorch's peak during it minus what was allocated before. Our trainer pushes full merged weights, as TRL
does, or adapters alone, which vLLM loads at the next request. A line has the cause as `error` when the ranks did not
finish. Our side also runs on CPUs, with --device cpu --size tiny.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.processes import ended_with
from benchmarks.common.runs import LOG_CHARS, REWARDS, JobError, append, start_trl_server, versions

STEPS, NEW_TOKENS, CONTEXT, CACHE = 5, 32, 512, 2**30
LORA = {"r": 16, "alpha": 32}
PORT = 18100


@click.command()
@click.option("--side", type=click.Choice(["ours", "trl"]), required=True)
@click.option(
    "--push",
    type=click.Choice(["merged", "adapters"]),
    default="merged",
    show_default=True,
    help="What our trainer sends.",
)
@click.option("--size", type=click.Choice(list(SHAPES)), default="7", show_default=True)
@click.option("--ranks", default=3, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--timeout", default=400, show_default=True, help="Longest time for engine and ranks, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("lora_sync.jsonl"), show_default=True)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of the random model; made if missing.",
)
@click.option("--rank", type=int, hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(
    side: str,
    push: str,
    size: str,
    ranks: int,
    device: str,
    timeout: int,
    output: Path,
    model: Path | None,
    rank: int | None,
    folder: Path | None,
) -> None:
    """Run one side and append a line."""
    if side == "trl" and device == "cpu":
        raise click.UsageError("TRL pushes weights by NCCL, which needs GPUs: only --side ours goes with --device cpu")
    if rank is not None:
        assert folder is not None
        assert model is not None
        sys.exit(_ours_rank(folder, device) if side == "ours" else _trl_rank(folder, model))
    line: dict[str, Any] = {"side": side, "size": size, "device": device, "ranks": ranks, "lora": LORA | {"push": push}}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        folder = Path(scratch)
        model = make_model(model or folder / "model", size, device, kind="qwen2", max_length=4096)
        failure = None
        try:
            with ended_with():
                settings = (
                    _ours_engine(folder, model, ranks, device, push)
                    if side == "ours"
                    else _trl_engine(folder, model, ranks)
                )
                arguments = ["--side", side, "--device", device, "--folder", str(folder), "--model", str(model)]
                _run_ranks(arguments, ranks, folder, settings, timeout)
            line |= _summary(folder)
        except JobError as error:
            failure = error
            line |= {"error": error.reason}
    line |= {"versions": versions("torch", "transformers", "deepspeed", "trl", "peft", "vllm")}
    line |= {
        "command": f"python -m benchmarks.weights.lora_sync --side {side} --push {push} --size {size}"
        f" --ranks {ranks} --device {device}"
    }
    append(output, line)
    if failure is not None:
        sys.exit(f"FAILED {side}\n{failure}")
    print(side, push, line["median"], "s", line["extra_gib"], "GiB", flush=True)


def _summary(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for path in sorted(folder.glob("syncs-*.jsonl")) for line in path.read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if row["rank"] == 0]
    extra = round(max(row["extra_gib"] for row in rows if row["number"]), 2)
    return {"median": round(statistics.median(seconds[1:]), 3), "extra_gib": extra, "syncs": rows}


def _run_ranks(arguments: list[str], number: int, folder: Path, settings: dict[str, str], timeout: int) -> None:
    ranks = []
    for rank in range(number):
        environ = os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
        environ |= {
            "LOCAL_WORLD_SIZE": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(PORT + 5),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number))),
        }
        with (folder / f"rank-{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.weights.lora_sync", *arguments, "--rank", str(rank)],
                    env=environ,
                    stdout=log,
                    stderr=log,
                )
            )
    deadline = time.monotonic() + timeout
    while (codes := [one.poll() for one in ranks]).count(0) < number:
        late = time.monotonic() > deadline
        if late or any(codes):
            logs = [f"--- {path.name}\n{path.read_text()[-LOG_CHARS:]}" for path in sorted(folder.glob("*.log"))]
            failed = next((rank for rank, code in enumerate(codes) if code), 0)
            last = (folder / f"rank-{failed}.log").read_text().rstrip().splitlines()[-1:]
            what = f"not done after {timeout} s" if late else f"rank {failed} ended with {codes[failed]}"
            raise JobError(f"{what}; the last line of rank {failed} is: {''.join(last)}", "\n".join(logs))
        time.sleep(0.5)


def _metered(sync: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Wrap `sync` so that the cost of each call on this rank is written down."""
    import torch

    path = folder / f"syncs-{os.environ['RANK']}.jsonl"
    on_gpu = torch.cuda.is_available()
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = sync(*args, **options)
        if on_gpu:
            torch.cuda.synchronize()
        row = {"rank": int(os.environ["RANK"]), "number": calls, "seconds": round(time.perf_counter() - start, 4)}
        row["extra_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3) if on_gpu else 0
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        calls += 1
        return result

    return call


def _ours_engine(folder: Path, model: Path, ranks: int, device: str, push: str) -> dict[str, str]:
    """Start the engine; return the variables by which ranks find it."""
    from grpo_cli.local.processes import local_contract
    from grpo_operator.api.spec import parse_spec
    from grpo_operator.layout.job import Job
    from grpo_operator.layout.topology import plan_topology

    spec = {
        "device": {"type": device},
        "model": {"path": str(model)},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
        "rewards": REWARDS,
        "lora": LORA | {"push": push},
        "training": {
            "promptsPerStep": ranks,
            "numGenerations": 4,
            "maxSteps": STEPS,
            "maxCompletionLength": NEW_TOKENS,
        },
        "parallelism": {"zeroStage": 3, "gradientCheckpointing": True},
        "generation": {
            "topology": "Server",
            "maxModelLen": CONTEXT,
            "kvCacheMemory": str(CACHE),
            "engineArgs": {"enforce_eager": True},
            "server": {"groups": [{"name": "engine", "gpus": 1}]},
        },
        "trainer": {"groups": [{"name": "t", "gpus": ranks}]},
        "storage": {"checkpointEverySteps": 1000},
        "rendezvous": {"timeoutSeconds": 300},
    }
    job = Job(namespace="bench", name="lora", uid="u", generation=1, spec=parse_spec(spec))
    contract = local_contract(job, plan_topology(job))
    (folder / "contract.json").write_text(contract.model_dump_json(by_alias=True))
    (engine,) = contract.engines
    common = {"GRPO_CONTRACT": str(folder / "contract.json"), "GRPO_DATA_DIR": str(folder)}
    own = {"GRPO_STATE_DIR": str(folder / "engine"), "GRPO_TERMINATION_LOG": str(folder / "ended")}
    (folder / "engine").mkdir()
    environ = os.environ | common | own | {"POD_NAME": engine.pod, "POD_UID": engine.pod}
    with (folder / "engine.log").open("w") as log:
        subprocess.Popen([sys.executable, "-m", "grpo_workload.engine_pod"], env=environ, stdout=log, stderr=log)
    return common | {"GRPO_STATE_DIR": str(folder), "POD_NAME": contract.members[0].pod, "POD_UID": "u"}


def _ours_rank(folder: Path, device: str) -> int:
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    from grpo_workload import rank
    from grpo_workload.generation.servers.generator import ServerGenerator

    ServerGenerator.sync_weights = _metered_method(ServerGenerator.sync_weights, folder)  # type: ignore[method-assign]
    return rank.main()


def _metered_method(method: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    metered = _metered(method, folder)
    return lambda self, *args, **options: metered(self, *args, **options)


def _trl_engine(folder: Path, model: Path, ranks: int) -> dict[str, str]:
    start_trl_server(
        str(model), port=PORT, context=CONTEXT, cache_bytes=CACHE, device=str(ranks), log=folder / "engine.log"
    )
    return {}


def _trl_rank(folder: Path, model: Path) -> NoReturn:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    VLLMGeneration.sync_weights = _metered_method(VLLMGeneration.sync_weights, folder)
    zero = {"stage": 3, "reduce_bucket_size": 50_000_000, "stage3_gather_16bit_weights_on_model_save": False}
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=NEW_TOKENS,
        max_steps=STEPS,
        bf16=True,
        deepspeed={
            "zero_optimization": zero,
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
        },
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=f"http://127.0.0.1:{PORT}",
        vllm_group_port=PORT + 1,
        vllm_server_timeout=240,
        model_init_kwargs={"dtype": "bfloat16"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"{number} plus {number} is"} for number in range(64)]),
        peft_config=LoraConfig(
            r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    os._exit(0)  # its communicator with the server would block a normal exit


if __name__ == "__main__":
    main()
