"""Code in the pages of the repository."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("devcluster/*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block; `is_tested`: its info string says `test`."""

    language: str
    is_tested: bool
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, without the indentation of a list that they stand in."""
    text = page.read_text()
    found = re.finditer(r"^( *)```(\w+)( test)?\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [Block(one[2], bool(one[3]), text[: one.start()].count("\n") + 1, textwrap.dedent(one[4])) for one in found]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Commands of a console's text, each with the lines that are shown of what it prints."""
    listed: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            listed.append((line.removeprefix("$ "), []))
        elif line:
            listed[-1][1].append(line)
    return listed
