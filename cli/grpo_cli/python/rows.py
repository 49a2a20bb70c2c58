"""The rows of a job's files, from a cluster, and as a table."""

from __future__ import annotations

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
    from grpo_cli.commands.copy import Place, copy_files
    from grpo_cli.ui.cluster import ClusterSource
    from grpo_cli.ui.folder import FolderSource
    from grpo_spec.lenient import mapping

    source = ClusterSource(kube, name)
    source.refresh()
    history = source.shown.history
    if not history.metrics:
        job = kube.job(name)
        storage = mapping(job["spec"].get("storage"))
        if not (claim := storage.get("claimName")):
            raise CliError(f"job {name}: {source.shown.note or 'no step has finished yet'}", Exit.NOT_FOUND)
        run = f"{storage.get('subPath', '')}/{kube.namespace}/{name}/{job['metadata']['uid']}".lstrip("/")
        with tempfile.TemporaryDirectory() as folder:
            copy_files(kube, Place(claim, f"{run}/{what}.jsonl"), Place(None, f"{folder}/"), image=None, job=job)
            files = FolderSource(Path(folder))
            files.refresh()
            history = files.shown.history
    return list(getattr(history, what))
