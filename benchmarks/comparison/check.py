"""Look up what docs/comparison.md says of others: each quote stands in its file, what was sought is nowhere.

    python -m benchmarks.comparison.check MIRRORS --fetch && python -m benchmarks.comparison.page

MIRRORS is a folder of git repositories, OWNER+NAME each; `--fetch` gets the commits that it lacks from GitHub (some
300 MB). A source with `package` is read from the installed package. Cells that fail are named and nothing is written.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from benchmarks.comparison.cells import RESULTS, Cell, Source, load


class Tree(Protocol):
    """The text files of a source at its commit."""

    def text(self, path: str) -> str | None:
        """Return a file, or nothing if there is none."""

    def found(self, expression: str, paths: Sequence[str]) -> str | None:
        """Return the first line below `paths` that matches, as PATH:NUMBER:TEXT, or nothing."""


@functools.cache
def _read(file: Path) -> str:
    return file.read_text(errors="replace")


class Package:
    """An installed package. Raise ValueError if it is not of the source's version."""

    def __init__(self, source: Source) -> None:
        assert source.package is not None
        installed = importlib.metadata.distribution(source.package)
        if f"v{installed.version}" != source.commit:
            raise ValueError(f"{source.name}: install {source.package}=={source.commit[1:]}, not {installed.version}")
        self._root = Path(str(installed.locate_file("")))

    def text(self, path: str) -> str | None:
        file = self._root / path
        return _read(file) if file.is_file() else None

    def found(self, expression: str, paths: Sequence[str]) -> str | None:
        pattern = re.compile(expression, re.IGNORECASE)
        for folder in paths:
            top = self._root / folder
            files = [top] if top.is_file() else sorted(one for one in top.rglob("*") if one.is_file())
            if not files:
                return f"{folder}: no such path"
            for file in files:
                if file.suffix != ".pyc" and (hit := pattern.search(text := _read(file))):
                    number = text[: hit.start()].count("\n")
                    return f"{file.relative_to(self._root)}:{number + 1}:{text.splitlines()[number].strip()}"
        return None


class Mirror:
    """A git repository. Raise ValueError if it lacks the source's commit."""

    def __init__(self, source: Source, mirrors: Path, *, fetch: bool = False) -> None:
        self._commit = source.commit
        folder = mirrors / source.repository.replace("/", "+")
        self._git = ["git", "-C", str(folder / "repo" if (folder / "repo").is_dir() else folder)]
        if fetch and self._run("cat-file", "-e", f"{self._commit}^{{commit}}") is None:
            subprocess.run(["git", "init", "--bare", "--quiet", folder], check=True)
            url = f"https://github.com/{source.repository}"
            subprocess.run([*self._git, "fetch", "--quiet", "--depth", "1", url, source.commit], check=True)
        if self._run("cat-file", "-e", f"{self._commit}^{{commit}}") is None:
            raise ValueError(f"{source.name}: {folder} has no commit {source.commit}; --fetch gets it")

    def text(self, path: str) -> str | None:
        return self._run("show", f"{self._commit}:{path}")

    def found(self, expression: str, paths: Sequence[str]) -> str | None:
        for path in paths:
            if self._run("cat-file", "-e", f"{self._commit}:{path}") is None:
                return f"{path}: no such path"
        lines = self._run("grep", "--ignore-case", "-nIP", "-e", expression, self._commit, "--", *paths)
        return lines.splitlines()[0].removeprefix(f"{self._commit}:") if lines else None

    def _run(self, *arguments: str) -> str | None:
        done = subprocess.run([*self._git, *arguments], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode and arguments[0] == "grep" and done.stderr:
            raise ValueError(f"git grep: {done.stderr.strip()}")
        return None if done.returncode else done.stdout


def tree(source: Source, mirrors: Path, *, fetch: bool = False) -> Tree:
    """Return the files of a source; raise ValueError if they are not there."""
    return Package(source) if source.package else Mirror(source, mirrors, fetch=fetch)


def look_up(cell: Cell, files: Tree) -> dict[str, Any]:
    """Return the line of the results; raise ValueError naming the cell and what is not so."""
    where = f"{cell.row}, {cell.source.name} ({cell.says})"
    if cell.nowhere:
        if hit := files.found(cell.nowhere, cell.paths):
            raise ValueError(f"{where}: {cell.nowhere} is in {hit[:160]}")
        return cell.claim
    at = []
    for path, quote in cell.proofs:
        text = files.text(path)
        if text is None or quote not in text:
            raise ValueError(f"{where}: {path} {'is not there' if text is None else f'does not say: {quote}'}")
        at.append({"path": path, "line": text[: text.index(quote)].count("\n") + 1, "text": quote})
    return cell.claim | {"at": at}


@click.command()
@click.argument("mirrors", type=click.Path(file_okay=False, path_type=Path))
@click.option("--fetch", is_flag=True, help="Get commits that MIRRORS lacks from GitHub.")
def main(mirrors: Path, *, fetch: bool) -> None:
    """Look up all cells in MIRRORS, and store what was found where."""
    sources, tables = load()
    cells = [cell for rows in tables.values() for row in rows for cell in row.cells]
    trees = {name: tree(source, mirrors, fetch=fetch) for name, source in sources.items()}
    lines: list[dict[str, Any]] = [{"checked": datetime.datetime.now(tz=datetime.UTC).date().isoformat()}]
    wrong = []
    for cell in cells:
        try:
            lines.append(look_up(cell, trees[cell.source.name]))
        except ValueError as error:
            wrong.append(str(error))
    for one in wrong:
        print(one)
    print(f"{len(cells) - len(wrong)} of {len(cells)} cells are as the page says")
    if wrong:
        sys.exit(1)
    RESULTS.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


if __name__ == "__main__":
    main()
