"""The rows of a job's files, from a cluster, and as a table."""

from __future__ import annotations

import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import CliError, Exit

if TYPE_CHECKING:
    from grpo_cli.cluster.kube import Kube, Object
    from grpo_cli.ui.history import History

Rows = Any
"""A DataFrame of pandas where it is installed, else a list with a mapping for each row."""


def table(rows: list[Any]) -> Rows:
    """Return rows as a DataFrame, where there is pandas."""
    if find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)


def rows_of(history: History, what: str) -> list[Any]:
    """Return the rows of a file, and warn where that has more than a history keeps."""
    if what == "completions" and history.older_completions:
        said = f"these are the newest {len(history.completions)} completions: {history.older_completions} older ones"
        warnings.warn(f"{said} are in the run's completions.jsonl, which grpo cp copies", stacklevel=4)
    return list(getattr(history, what))


class RowsInCluster:
    """Rows from rank 0's launcher while its pod runs, else from the files on the job's claim.

    The files of a job that has ended are fetched once.
    """

    def __init__(self) -> None:
        self._ended: dict[str, History] = {}  # by UID

    def read(self, kube: Kube, name: str, what: str) -> list[Any]:
        """Return the rows of a file. Raises CliError, SourceError, ApiException."""
        job = kube.job(name)
        history = self._ended.get(job["metadata"]["uid"]) or self._read(kube, job, name)
        return rows_of(history, what)

    def _read(self, kube: Kube, job: Object, name: str) -> History:
        from grpo_cli.ui.cluster import ClusterSource
        from grpo_cli.ui.finished import fetch, is_away
        from grpo_operator.api.status import read_status
        from grpo_operator.decide.conditions import is_terminal

        with tempfile.TemporaryDirectory() as folder:
            has_files = is_away(kube, job) and fetch(kube, job, Path(folder), lambda said: print(said, file=sys.stderr))
            source = ClusterSource(kube, name, Path(folder) if has_files else None)
            source.refresh()
        if not source.shown.history.metrics:
            raise CliError(f"job {name}: {source.shown.note or 'no step has finished yet'}", Exit.NOT_FOUND)
        if has_files and is_terminal(read_status(job.get("status"))):
            self._ended[job["metadata"]["uid"]] = source.shown.history
        return source.shown.history
