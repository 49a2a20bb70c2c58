"""Write the generated parts of docs/performance.md and docs/operating.md from the stored lines of `scale.py` alone.

python -m benchmarks.control_plane.page
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial

from benchmarks import ROOT
from benchmarks.control_plane import accounts, plots
from benchmarks.control_plane.figures import (
    SIDES,
    TARGETS,
    Lines,
    Raw,
    beside,
    median,
    percentile,
    ready,
    reported,
    requests,
    rss,
)

RESULTS = ROOT / "benchmarks/results/scale.jsonl"
PAGES = (ROOT / "docs/performance.md", ROOT / "docs/operating.md")
IMAGES = ROOT / "docs/images"
NOT_MEASURED = "Not measured yet."


def main() -> None:
    """Write pages and plots."""
    lines = Lines.read(RESULTS)
    for page in PAGES:
        page.write_text(fill(page.read_text(), lines))
    plots.save(lines, IMAGES)


def fill(text: str, lines: Lines) -> str:
    """Return a page with what is between `<!-- generated: NAME -->` and `<!-- end -->` replaced."""

    def part(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n\n{PARTS[found[1]](lines)}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table, whose columns but the first hold numbers."""
    if not rows:
        return NOT_MEASURED
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def targets(lines: Lines) -> str:
    """Return the table of targets."""
    rows = []
    for target in TARGETS:
        value = target.measured(lines)
        verdict = "" if value is None else "yes" if value <= target.limit else "no"
        shown = "not measured" if value is None else number(value, target.unit)
        rows.append([target.what, f"at most {number(target.limit, target.unit)}", shown, verdict])
    return table(["", "target", "measured", "met"], rows)


def about(lines: Lines) -> str:
    """Return what the lines say about machine and programs."""
    if not lines.every:
        return NOT_MEASURED

    def all_of(value: Callable[[Raw], object]) -> str:
        return " and ".join(sorted({str(value(line)) for line in lines.every}))

    def version_of(name: str, line: Raw) -> object:
        return line["versions"][name]

    names = {"kubernetes control plane": "Kubernetes", "jobset": "JobSet", "lws": "LWS", "kopf": "kopf"}
    versions = [f"{shown} {all_of(partial(version_of, name))}" for name, shown in names.items()]
    programs = ", ".join([f"{all_of(lambda line: line['cpus'])} processors", *versions])
    commit = all_of(lambda line: line["commit"])
    repetitions = max(Counter((line["scenario"], line["side"], line["jobs"]) for line in lines.every).values())
    commands = "\n".join(f"    {command}" for command in sorted({line["command"] for line in lines.every}))
    loads = [line["load average"] for line in lines.every]  # of five minutes, when a run began: by other programs
    load = f"load average before runs {min(loads)} to {max(loads)}"
    return f"{programs}; commit {commit}; at most {repetitions} repetitions; {load}.\n\n{commands}"


def comparison(scenario: str) -> Callable[[Lines], str]:
    """Return the function that makes a scenario's table of sides."""

    def made(lines: Lines) -> str:
        rows = []
        for side in lines.sides(scenario):
            found = lines.of(scenario, side)
            ratios = [
                f"{beside(found, lines.of(scenario, other)):.2f}x" if other in lines.sides(scenario) else ""
                for other in ("bare", "jobset")
            ]
            rows.append(
                [
                    SIDES[side],
                    seconds(found, ready),
                    seconds(found, reported) if side != "bare" else "",
                    *ratios,
                    f"{median(found, requests):.0f}" if side != "bare" else "",
                    f"{median(found, lambda line: line['cpu']['controller']):.1f} s" if side != "bare" else "",
                    f"{median(found, lambda line: line['busy']):.0%}",
                ]
            )
        head = ["", "ready", "reported", "beside bare", "beside JobSet", "requests a job", "CPU", "processors"]
        return table(head, rows)

    return made


def seconds(lines: list[Raw], value: Callable[[Raw], float]) -> str:
    """Return the median in seconds, with the range over repetitions."""
    values = [value(line) for line in lines]
    span = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{median(lines, value):.1f} s{span}"


def burst(lines: Lines) -> str:
    """Return the table of the time until a job's children are applied, and the requests that it took."""
    rows = []
    for count in lines.sizes("burst"):
        found = lines.of("burst", "grpojob", jobs=count)
        times = [f"{share(found, 'children', one):.2f} s" for one in (0.5, 0.95, 1.0)]
        rows.append([f"{count} jobs at once", *times, f"{median(found, requests):.1f}"])
    return table(["from a job's creation to its last child", "p50", "p95", "max", "requests a job"], rows)


def kinds(lines: Lines) -> str:
    """Return the table of requests for a new job, by verb and resource."""
    found = [line for line in lines.every if line["scenario"] == "burst"]
    counts = {
        name: statistics.median(line["requests"].get(name, 0) / line["jobs"] for line in found)
        for name in sorted({name for line in found for name in line["requests"]})
    }
    most_first = sorted(counts.items(), key=lambda pair: -pair[1])
    return table(["request", "a job"], [[name, f"{count:.2f}"] for name, count in most_first])


def restart(lines: Lines) -> str:
    """Return the table of restarts, by the operator and by hand."""
    if not lines.sides("restart"):
        return NOT_MEASURED
    ours, by_hand = lines.of("restart", "grpojob"), lines.of("restart", "bare")
    rows, whole = [], []
    for name, found, one, all_of in (
        ("GRPOJob: a rank fails", ours, "one", "together"),
        ("of this the operator's part", ours, "operator one", "operator together"),
        ("bare StatefulSets: scaled to 0, and up again", by_hand, "one", "together"),
    ):
        times = [share(found, one, 0.5), share(found, all_of, 0.5), share(found, all_of, 1.0)]
        rows.append([name, *(f"{time:.2f} s" for time in times), f"{times[2] / times[0]:.1f}x"])
        if one == "one":
            whole.append(times)
    rows.append(["GRPOJob beside bare", *(f"{mine / bare:.2f}x" for mine, bare in zip(*whole, strict=True)), ""])
    return table(["seconds of a restart", "one job", "50 at once, median", "50 at once, last", "last / one"], rows)


def large(lines: Lines) -> str:
    """Return the table of large installations: a column for each number of jobs."""
    facts: list[tuple[str, str, Callable[[Raw], float]]] = [
        ("all jobs run after", "{:.0f} s", reported),
        ("memory, all jobs run", "{:.0f} MiB", lambda line: line["use"]["running"]["rss"]),
        ("memory, at most", "{:.0f} MiB", rss),
        ("requests in a quiet minute", "{:.0f}", lambda line: sum(line["quiet"]["requests"].values())),
        ("of them writes", "{:.0f}", lambda line: line["quiet"]["writes"]),
        ("processors taken in a quiet minute", "{:.3f}", quiet_cores),
        ("processors taken while all jobs train", "{:.3f}", training_cores("controller")),
        ("of the API server then", "{:.3f}", training_cores("kube-apiserver")),
        ("writes a second then", "{:.1f}", lambda line: line["training"]["writes"] / line["training"]["seconds"]),
        ("age of the step that a status shows then", "{:.0f} s", lambda line: line["training"]["age"]),
        ("killed and started: level after", "{:.1f} s", lambda line: line["restart"]["level"]),
        ("jobs restarted meanwhile", "{:.0f}", lambda line: line["restart"]["restarts"]),
        ("writes to jobs meanwhile", "{:.0f}", lambda line: line["restart"]["writes"]),
    ]
    sizes = lines.sizes("large")
    rows = [
        [name, *(form.format(median(lines.of("large", "grpojob", jobs=count), value)) for count in sizes)]
        for name, form, value in facts
    ]
    return table(["", *(f"{count:,} jobs" for count in sizes)], rows if sizes else [])


def share(lines: list[Raw], key: str, one: float) -> float:
    """Return the median of a percentile of raw values."""
    return median(lines, lambda line: percentile(line["raw"][key], one))


def quiet_cores(line: Raw) -> float:
    """Return the processors that the operator took while nothing happened."""
    use = line["use"]
    return float((use["quiet"]["cpu"] - use["running"]["cpu"]) / line["quiet"]["seconds"])


def training_cores(program: str) -> Callable[[Raw], float]:
    """Return the function that returns the processors that a program took while all jobs trained."""
    return lambda line: float(line["training"]["cpu"][program] / line["training"]["seconds"])


def number(value: float, unit: str) -> str:
    """Return a figure with its unit, with no more digits than say something."""
    shown = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
    return f"{shown}{unit}" if unit == "x" else f"{shown} {unit}".strip()


PARTS: dict[str, Callable[[Lines], str]] = {
    "targets": targets,
    "about": about,
    "jobs": comparison("jobs"),
    "programs": lambda lines: table(*accounts.programs(lines)),
    "costs": lambda lines: table(*accounts.requests(lines)),
    "pods": comparison("pods"),
    "burst": burst,
    "kinds": kinds,
    "restart": restart,
    "large": large,
}


if __name__ == "__main__":
    main()
