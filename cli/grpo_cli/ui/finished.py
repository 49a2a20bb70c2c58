"""The files of a run whose pods are gone, fetched once from the job's claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_cli.cluster.copying import transfer
from grpo_cli.cluster.copying.folder import Folder
from grpo_cli.cluster.copying.served_claim import served
from grpo_cli.cluster.kube import Kube, Object
from grpo_cli.cluster.pod_http import PodError
from grpo_cli.errors import CliError, Exit
from grpo_cli.screen.view import read_topology, serving_master
from grpo_operator.api.status import read_status
from grpo_spec.lenient import mapping
from grpo_spec.reports import LOGS_FOLDER, RUN_FILES

WANTED = frozenset(f"{name}.jsonl" for name in RUN_FILES)


def is_log(name: str) -> bool:
    """Whether a file of a run's folder is the end of a pod's log."""
    return name.startswith(f"{LOGS_FOLDER}/") and name.endswith(".log")


def is_away(kube: Kube, job: Object) -> bool:
    """Whether a job has run, and the pod that serves its curves does not run."""
    may_have = read_topology(job) is not None and may_have_curves(job)
    return may_have and serving_master(job, kube.pods(job)) is None


def may_have_curves(job: Object) -> bool:
    """Whether a job has begun, and not only just: pods of a first attempt may wait long, and images take minutes."""
    status = read_status(job.get("status"))
    return bool(status.attempt or (status.attempt == 0 and (status.running_time or status.completion_time)))


def is_shown(name: str) -> bool:
    """Whether `grpo ui` shows a file of a run's folder."""
    return name in WANTED or is_log(name)


def fetch(
    kube: Kube, job: Object, folder: Path, say: Callable[[str], None], wanted: Callable[[str], bool] = is_shown
) -> bool:
    """Copy the run's files into a folder, by a short-lived pod that mounts the claim as the job's pods do.

    Returns whether there are any: a job without a claim keeps none, and one that ended early has none. Raises CliError
    and ApiException.
    """
    metadata, storage = job["metadata"], mapping(job["spec"].get("storage"))
    claim = storage.get("claimName")
    if not isinstance(claim, str):
        return False
    run = "/".join((metadata["namespace"], metadata["name"], metadata["uid"]))
    path = transfer.join(str(storage.get("subPath") or ""), run)
    say(f"no pod of {metadata['name']} runs: reading {claim}:{path} by a short-lived pod")
    try:
        with served(kube, claim, say, image=None, job=job) as there:
            found = there.look(path)
            files = {name: size for name, size in found["files"].items() if wanted(name)}
            transfer.copy(there, path, Folder(str(folder)), "", lambda *_: None, found | {"files": files})
    except transfer.NotCopiedError as error:  # an attempt has begun, and rewrites them
        raise CliError(f"{error}: the job goes on, try again", Exit.FAILED) from error
    except (OSError, PodError) as error:
        raise CliError(f"claim {claim}: {error}", Exit.UNREACHABLE) from error
    return bool(files)
