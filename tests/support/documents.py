"""Blocks of code in the pages of the repository."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import yaml

from support.paths import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("devcluster/*.md")]
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    is_tested: bool  # whether its info string says `test`
    line: int  # number of its first line in the page
    text: str


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page, without the indentation of the list item around them."""
    text = page.read_text()
    found = re.finditer(r"^( *)```(\w+)( test)?\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [Block(one[2], bool(one[3]), text[: one.start()].count("\n") + 1, textwrap.dedent(one[4])) for one in found]


def write_code(manifest: Path, folder: Path) -> None:
    """Write the files that a manifest brings in a ConfigMap."""
    for one in yaml.safe_load_all(manifest.read_text()):
        for file, text in one.get("data", {}).items():
            (folder / file).write_text(text)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a console's text, each with the lines of its output that the page shows."""
    listed: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            listed.append((line.removeprefix("$ "), []))
        elif line:
            listed[-1][1].append(line)
    return listed
