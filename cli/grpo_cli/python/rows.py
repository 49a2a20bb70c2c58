"""The rows of a job's files, from a cluster, and as a table."""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import CliError, Exit

if TYPE_CHECKING:
    from grpo_cli.cluster.kube import Kube

Rows = Any
"""A DataFrame of pandas where it is installed, else a list with a mapping for each row."""


def table(rows: list[Any]) -> Rows:
    """Return rows as a DataFrame, where there is pandas."""
    if find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)


def rows_in_cluster(kube: Kube, name: str, what: str) -> list[Any]:
    """Return rows from rank 0's launcher while its pod runs, else from the files on the job's claim."""
    from grpo_cli.ui.cluster import ClusterSource
    from grpo_cli.ui.finished import fetch, is_away

    job = kube.job(name)
    with tempfile.TemporaryDirectory() as folder:
        has_files = is_away(kube, job) and fetch(kube, job, Path(folder), lambda said: print(said, file=sys.stderr))
        source = ClusterSource(kube, name, Path(folder) if has_files else None)
        source.refresh()
    if not source.shown.history.metrics:
        raise CliError(f"job {name}: {source.shown.note or 'no step has finished yet'}", Exit.NOT_FOUND)
    return list(getattr(source.shown.history, what))
