"""Figures from the raw lines of `scale.py`: medians over repetitions, ratios of sides, and targets. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Raw = dict[str, Any]

SIDES = {
    "bare": "bare StatefulSets",
    "grpojob": "GRPOJob",
    "jobset": "JobSet",
    "lws": "LeaderWorkerSet",
}
"""Names of the sides, in the order in which they are shown."""

MANY, ONE, TOGETHER, LARGE = 250, 1000, 50, 1000
"""Subjects of targets: jobs at once, pods of one job, failures at once, jobs of a large installation."""


class MissingError(Exception):
    """There is no line of what is asked for."""


@dataclass(frozen=True)
class Lines:
    """All raw lines of a file."""

    every: Sequence[Raw]

    @classmethod
    def read(cls, path: Path) -> Lines:
        """Read a file of one JSON object for each line; a file that is not there has none."""
        text = path.read_text() if path.exists() else ""
        return cls([json.loads(line) for line in text.splitlines()])

    def of(self, scenario: str, side: str, **more: int) -> list[Raw]:
        """Return a line for each repetition. Raises MissingError if there is none."""
        wanted = {"scenario": scenario, "side": side, **more}
        found = [line for line in self.every if all(line.get(key) == value for key, value in wanted.items())]
        if not found:
            raise MissingError(f"{scenario} of {side}")
        return found

    def sides(self, scenario: str) -> list[str]:
        """Return the sides of which there are lines."""
        found = {line["side"] for line in self.every if line["scenario"] == scenario}
        return [side for side in SIDES if side in found]

    def sizes(self, scenario: str) -> list[int]:
        """Return the numbers of jobs of which there are lines."""
        return sorted({line["jobs"] for line in self.every if line["scenario"] == scenario})


def median(lines: Sequence[Raw], value: Callable[[Raw], float]) -> float:
    """Return the median over lines."""
    return statistics.median(value(line) for line in lines)


def ready(line: Raw) -> float:
    """Return the seconds until all pods were ready."""
    return float(line["seconds"]["ready"])


def reported(line: Raw) -> float:
    """Return the seconds until all pods were ready and, if there is one, the status said so."""
    return max(ready(line), line["seconds"]["status"] or 0.0)


def beside(ours: Sequence[Raw], theirs: Sequence[Raw]) -> float:
    """Return the median over repetitions of the time of one side divided by that of another just before or after it.

    What else the machine does changes over minutes. The last repetition may lack a side.
    """
    return statistics.median(reported(one) / reported(other) for one, other in zip(ours, theirs, strict=False))


def requests(line: Raw) -> float:
    """Return the number of requests of the controller for each job."""
    return float(sum(line["requests"].values()) / line["jobs"])


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values, from 0 to 1, does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def rss(line: Raw) -> float:
    """Return the largest memory of the operator, in MiB."""
    return float(max(one["rss"] for one in line["use"].values()))


@dataclass(frozen=True)
class Target:
    """A promise, and its computation from the lines."""

    what: str
    limit: float
    unit: str
    value: Callable[[Lines], float]

    def measured(self, lines: Lines) -> float | None:
        """Return the figure, or None if it is not measured."""
        try:
            return self.value(lines)
        except MissingError:
            return None


def _beside(scenario: str, side: str, count: dict[str, int]) -> Callable[[Lines], float]:
    """The time of GRPOJob divided by that of another side."""
    return lambda lines: beside(lines.of(scenario, "grpojob", **count), lines.of(scenario, side, **count))


def _of(scenario: str, count: int, value: Callable[[Raw], float]) -> Callable[[Lines], float]:
    """The median of a value of GRPOJob."""
    return lambda lines: median(lines.of(scenario, "grpojob", jobs=count), value)


def together_beside_one(line: Raw) -> float:
    """Return the seconds until all jobs run again that failed at once, divided by the median of single ones."""
    return float(max(line["raw"]["together"]) / statistics.median(line["raw"]["one"]))


JOBS = f"{MANY} jobs of 4 pods, ready and reported"
TARGETS = (
    Target(f"{JOBS}, beside bare StatefulSets", 1.5, "x", _beside("jobs", "bare", {"jobs": MANY})),
    Target(f"{JOBS}, beside JobSet", 0.6, "x", _beside("jobs", "jobset", {"jobs": MANY})),
    Target(
        "one job of 1,000 pods, ready and reported, beside bare StatefulSets",
        1.15,
        "x",
        _beside("pods", "bare", {"pods": ONE}),
    ),
    Target(
        "from a job's creation to its last child, p95 of 100 jobs at once",
        1.0,
        "s",
        _of("burst", 100, lambda line: percentile(line["raw"]["children"], 0.95)),
    ),
    Target("requests of the operator for a new job", 20, "", _of("burst", 100, requests)),
    Target(
        f"{TOGETHER} jobs that fail at once run again, beside one job",
        2.0,
        "x",
        _of("restart", TOGETHER, together_beside_one),
    ),
    Target("memory of the operator at 1,000 jobs", 400, "MiB", _of("large", LARGE, rss)),
    Target(
        "requests of the operator in a quiet minute, for each job",
        0,
        "",
        _of("large", LARGE, lambda line: sum(line["quiet"]["requests"].values()) / line["jobs"]),
    ),
    Target(
        "writes of the operator in a quiet minute", 0, "", _of("large", LARGE, lambda line: line["quiet"]["writes"])
    ),
    Target(
        "from the start of a killed operator until it is level, at 1,000 jobs",
        30,
        "s",
        _of("large", LARGE, lambda line: line["restart"]["level"]),
    ),
    Target(
        "restarts of jobs, and writes to them, that this caused",
        0,
        "",
        _of("large", LARGE, lambda line: line["restart"]["restarts"] + line["restart"]["writes"]),
    ),
)
