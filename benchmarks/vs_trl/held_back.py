"""Generation of both sides of `trainer.py` with processors held back: two cores for a GPU, and a busy loop on each.

    python -m benchmarks.vs_trl.held_back --plan held:equal=3,free:lognormal=2 --model /tmp/model --output out.jsonl
    python -m benchmarks.vs_trl.held_back --plan held:equal=3 --swap --model /tmp/model --output out.jsonl

Both sides run at the same time, each on a GPU of its own. Loading and the first step, of equal lengths, have half of
the machine's cores. A part of the plan says which cores a side has, the lengths, and how many steps: `held`, the first
two of its half; `free`, all of them. Each step gives a line. It says for the generation how many seconds each thread
ran and waited for a core, and how long Python collected garbage. `engine` is the thread that drives vLLM.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil

from benchmarks.common.lengths import lengths
from benchmarks.common.metered import Meter, now
from benchmarks.common.models import make_model
from benchmarks.common.processes import ended_with
from benchmarks.common.runs import about, append, versions
from benchmarks.vs_trl.trainer_rows import Row

ROWS = {"ours": "ours-equal-default", "trl": "trl-equal-liger"}
HELD_CORES = 2
LOOK_SECONDS = 0.5
THREADS = 8  # of a step's line: those that ran longest


class Step(NamedTuple):
    """A step of the plan."""

    cores: str
    lengths: str


@click.command()
@click.option("--plan", required=True, help="Parts like held:equal=3 or free:lognormal=2, separated by commas.")
@click.option("--swap", is_flag=True, help="Ours on the second GPU.")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Folder of the model; made if missing.")
@click.option("--size", default="1.5", show_default=True, help="Billions of parameters, or tiny.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--timeout", default=400, show_default=True, help="Longest time for both sides, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--side", type=click.Choice(list(ROWS)), hidden=True)
@click.option("--place", type=int, hidden=True)
def main(
    plan: str,
    swap: bool,
    model: Path,
    size: str,
    device: str,
    timeout: int,
    output: Path,
    side: str | None,
    place: int | None,
) -> None:
    """Run both sides at once, each in its own process."""
    if side is not None:
        assert place is not None
        measure(side, place, [Step("free", "equal"), *parsed(plan)], model, size, device, output.resolve())
    make_model(model, size, device, kind="qwen2", max_length=4096)
    parsed(plan)
    jobs = []
    with ended_with():
        for number, name in enumerate(reversed(ROWS) if swap else ROWS):
            # TRL's processes of two runs would listen on one port. torch would start a thread for each core.
            variables = {"CUDA_VISIBLE_DEVICES": str(number), "MASTER_PORT": str(29500 + number)}
            variables |= {"OMP_NUM_THREADS": str(HELD_CORES)}
            with Path(f"{output}.{name}.log").open("w") as log:
                command = [sys.executable, *sys.argv, "--side", name, "--place", str(number)]
                jobs.append(subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log))
        end = time.monotonic() + timeout
        while None in (codes := [job.poll() for job in jobs]) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
    sys.exit(f"exit codes {codes}: see {output}.*.log" if any(codes) or None in codes else 0)


def parsed(plan: str) -> list[Step]:
    """Return the steps of a plan. Raises UsageError for a part that does not exist."""
    steps = []
    for part in plan.split(","):
        name, _, count = part.partition("=")
        cores, _, kind = name.partition(":")
        if cores not in ("held", "free") or kind not in ("equal", "lognormal") or not count.isdigit():
            raise click.UsageError(f"--plan {part}: use held or free, equal or lognormal, and a number: held:equal=3")
        steps += [Step(cores, kind)] * int(count)
    return steps


def measure(side: str, place: int, plan: list[Step], model: Path, size: str, device: str, output: Path) -> None:
    """Measure one side in this process, which ends with it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    count = os.cpu_count() or 1
    cores = Cores(range(place * count // 2, (place + 1) * count // 2))
    cores.give("free")
    is_tiny = size == "tiny"
    train, _ = Row.parse(ROWS[side], ()).prepare(model, device, longest=64 if is_tiny else 2048)
    options = {"plan": ",".join(f"{step.cores}:{step.lengths}=1" for step in plan[1:]), "size": size, "device": device}
    PlannedMeter(plan, cores, 1 / 32 if is_tiny else 1.0, output, {"side": side, "gpu": place}, options).install()
    train()
    sys.exit("training ended before the planned steps did")


class Cores:
    """The cores of one side."""

    def __init__(self, half: range) -> None:
        self._half = half
        self._loops: list[subprocess.Popen[bytes]] = []

    def give(self, what: str) -> None:
        """Let all threads of this process and its children run on the cores of `held` or `free` alone."""
        cores = list(self._half[:HELD_CORES] if what == "held" else self._half)
        loops = {loop.pid for loop in self._loops}
        me = psutil.Process()
        for process in [me, *(child for child in me.children(recursive=True) if child.pid not in loops)]:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)
        if what == "held" and not self._loops:
            for core in cores:
                command = ["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]
                self._loops.append(subprocess.Popen(command))
        if what == "free":
            for loop in self._loops:
                loop.kill()
                loop.wait()
            self._loops = []


class PlannedMeter(Meter):
    """A meter whose steps have the lengths and cores of a plan, and give a line each."""

    def __init__(
        self, plan: list[Step], cores: Cores, scale: float, output: Path, head: dict[str, Any], options: dict[str, str]
    ) -> None:
        super().__init__([], warmup=0, steps=len(plan), finish=lambda _: cores.give("free"), profile=None)
        self._plan, self._cores, self._scale, self._output = plan, cores, scale, output
        self._head, self._options = head, options
        self._used: dict[str, Any] = {}
        self._before: dict[int, Thread] = {}
        self._collecting_since = self._collected = 0.0
        gc.callbacks.append(self._collects)

    def expanded(self, requests: Any, params: Any) -> Any:
        """See `Meter.expanded`, for the next step of the plan."""
        step = self._plan[min(len(self._starts), len(self._plan) - 1)]
        self._wanted = lengths(step.lengths, self._scale)
        self._cores.give(step.cores)
        return super().expanded(requests, params)

    def begin(self) -> None:
        """See `Meter.begin`. The step before has ended."""
        if self._starts:
            self._write(len(self._starts) - 1, now())
        super().begin()
        self._collected, self._before = 0.0, threads()

    def end(self, outputs: Any) -> None:
        """See `Meter.end`."""
        used: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for number, thread in threads().items():
            before = self._before.get(number, Thread("", 0.0, 0.0))
            sums = used["engine" if number == threading.get_native_id() else thread.name]
            sums[0] += thread.ran - before.ran
            sums[1] += thread.waited - before.waited
        longest = sorted(used.items(), key=lambda item: -item[1][0])[:THREADS]
        self._used = {"collector": round(self._collected, 3)}
        self._used["threads"] = {name: [round(value, 3) for value in sums] for name, sums in longest}
        super().end(outputs)

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            self._collected += time.perf_counter() - self._collecting_since

    def _write(self, index: int, end: float) -> None:
        generation = self._seconds["generation"][index]
        line = self._head | {"step": index, **self._plan[index]._asdict(), "generation": round(generation, 3)}
        line |= {"rest": round(end - self._starts[index] - generation, 3)} | self._used
        line |= about("benchmarks.vs_trl.held_back", **self._options)
        line["versions"] |= versions("trl")
        append(self._output, line)


class Thread(NamedTuple):
    """The kernel's counts for a thread."""

    name: str
    ran: float  # seconds on a core
    waited: float  # seconds for a core


def threads() -> dict[int, Thread]:
    """Return the threads of this process by their number."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            name = (folder / "comm").read_text().strip()
            ran, waited, _ = map(int, (folder / "schedstat").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        found[int(folder.name)] = Thread(name, ran / 1e9, waited / 1e9)
    return found


if __name__ == "__main__":
    main()
