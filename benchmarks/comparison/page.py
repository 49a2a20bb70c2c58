"""Write the generated parts of docs/comparison.md from cells.yaml, and the lines where `check.py` found the quotes.

python -m benchmarks.comparison.page
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks import ROOT
from benchmarks.comparison.cells import RESULTS, Row, Source, load

PAGE = ROOT / "docs/comparison.md"


def main() -> None:
    """Write the page."""
    PAGE.write_text(fill(PAGE.read_text(), RESULTS.read_text()))


def fill(text: str, results: str) -> str:
    """Return the page with what is between `<!-- generated: NAME -->` and `<!-- end -->` replaced.

    Raise ValueError if a cell is not in the results: nobody has looked it up since it was written.
    """
    sources, tables = load()
    head, *lines = [json.loads(line) for line in results.splitlines()]
    parts = {"sources": _sources(sources, head["checked"])}
    found = {(line["table"], line["row"], line["of"]): line for line in lines}
    links: dict[str, int] = {}
    for name, rows in tables.items():
        parts[name] = _table(rows, found, links)
    parts["links"] = "\n".join(f"[{number}]: {url}" for url, number in links.items())

    def part(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n\n{parts[found[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def _sources(sources: dict[str, Source], checked: str) -> str:
    rows = [
        f"| {one.name} | {one.repository} | [{one.commit[:7]}]({one.url.replace('/blob/', '/tree/')}) | {one.date} |"
        for one in sources.values()
    ]
    return "\n".join([f"Looked up on {checked} in:", "", "| | repository | commit | of |", "|---|---|---|---|", *rows])


def _table(rows: list[Row], found: dict[tuple[str, str, str], dict[str, Any]], links: dict[str, int]) -> str:
    """Return a table; its links are added to `links`, which numbers them."""
    names = [cell.source.name for cell in rows[0].cells]
    written = [["", "here", *names], ["---"] * (len(names) + 2)]
    for row in rows:
        cells = [row.name, " ".join(f"[{row.here}](../tests/{test})" for test in row.tests) or row.here]
        for cell in row.cells:
            line = found.get((cell.table, cell.row, cell.source.name), {})
            at = line.get("at", [])
            if not line.items() >= cell.claim.items() or [(one["path"], one["text"]) for one in at] != [*cell.proofs]:
                raise ValueError(f"{row.name}, {cell.source.name}: run `python -m benchmarks.comparison.check`")
            if at:
                url = f"{cell.source.url}/{at[0]['path']}#L{at[0]['line']}"
                cells.append(f"[{cell.says}][{links.setdefault(url, len(links) + 1)}]")
            else:
                cells.append(cell.says)
        written.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in written)


if __name__ == "__main__":
    main()
