"""Write the columns of docs/models.md that say what was tried, from the stored lines alone.

python -m benchmarks.weights.models_page
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.weights.train_families import MODES

PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results"
PLACES = {"cpu": "CPU", "h100": "H100", "h200": "H200"}
# Modes of the lines of before, in which weights were changed by hand.
PUSHES = {"all": "2:full", "zero3": "3:full", "adapters": "2:lora"}
ROW = re.compile(r"^\| `(?!model_type)(\w+)` \|([^|\n]*)\|[^|\n]*\|[^|\n]*\|[^|\n]*\|$", re.MULTILINE)

Tried = dict[str, dict[str, set[str]]]
"""Modes that went well, by family and place."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(fill(PAGE.read_text()))


def fill(text: str) -> str:
    """Return the page with its columns as the results have them."""
    trained, followed, pushed = trainings(), trainings(of_pushes=True), pushes()

    def row(found: re.Match[str]) -> str:
        family, example = found.groups()
        left = {place: modes - followed[family][place] for place, modes in pushed[family].items()}
        cells = [
            _cell(trained[family], MODES),
            _cell(followed[family], MODES),
            _cell(left, tuple(PUSHES.values())),
        ]
        return f"| `{family}` |{example}|" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    return ROW.sub(row, text)


def trainings(*, of_pushes: bool = False) -> Tried:
    """Return in which modes steps were taken; `of_pushes`: and engines followed their pushes."""
    tried: Tried = defaultdict(lambda: defaultdict(set))
    for place, row in _rows("train_families"):
        if "error" not in row and (row["pushed"] or not of_pushes):
            tried[row["family"]][place].add(row["mode"])
    return tried


def pushes() -> Tried:
    """Return in which modes engines followed three pushes of weights that were changed by hand."""
    tried: Tried = defaultdict(lambda: defaultdict(set))
    for place, row in _rows("families"):
        if "error" not in row:
            assert len(row["pushed"]) == 3
            tried[row["family"]][place].add(PUSHES[row["mode"]])
    return tried


def _rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and line."""
    for suffix, place in PLACES.items():
        path: Path = RESULTS / f"{name}_{suffix}.jsonl"
        yield from ((place, json.loads(line)) for line in path.read_text().splitlines()) if path.exists() else ()


def _cell(tried: dict[str, set[str]], every: tuple[str, ...]) -> str:
    return ", ".join(
        place if modes >= {*every} else f"{place} ({_words(mode for mode in every if mode in modes)})"
        for place in PLACES.values()
        if (modes := tried.get(place, set()))
    )


def _words(modes: Iterable[str]) -> str:
    """Name modes: full 0 2 3; LoRA 0 2."""
    stages: dict[str, list[str]] = defaultdict(list)
    for mode in modes:
        stages[mode[2:]].append(mode[0])
    names = {"full": "full", "lora": "LoRA"}
    return "; ".join(f"{name} {' '.join(sorted(stages[kind]))}" for kind, name in names.items() if stages[kind])


if __name__ == "__main__":
    main()
