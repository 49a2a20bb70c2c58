"""Notebooks of examples/notebooks, run by a kernel of their own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from support.paths import EXAMPLES


def run_notebook(name: str, folder: Path, changes: Mapping[str, str], **env: str) -> str:
    """Run a notebook in `folder` and return all that it prints.

    `changes`: texts of its code, each of which must be in it, and what stands there instead.
    Raises nbclient's CellExecutionError, with what the cell printed.
    """
    book = nbformat.read(EXAMPLES / "notebooks" / name, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count], f"{name} is stored with outputs"
    for old, new in changes.items():
        assert any(old in cell.source for cell in code), old
        for cell in code:
            cell.source = cell.source.replace(old, new)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MPLBACKEND": "agg"} | env
    NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=str(folder), env=environ)
    outputs = [output for cell in code for output in cell.outputs]
    return "".join(one["text"] for one in outputs if one.output_type == "stream" and one.name == "stdout")
