"""Jobs for notebooks and CI: made of keyword arguments, of YAML or of TRL's configuration; run here or on a cluster.

It does what the commands do, and imports no torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from grpo_cli.documents.manifest import Document, JobDocument, load_documents, only_job, read_documents, read_job
from grpo_cli.documents.yaml_values import write_yaml
from grpo_cli.errors import CliError, Exit
from grpo_cli.python.rows import Rows, RowsInCluster, rows_of, table
from grpo_operator.api import names
from grpo_operator.api.spec import GRPOJobSpec

if TYPE_CHECKING:
    from grpo_cli.cluster.kube import Kube


class JobFailedError(RuntimeError):
    """A job that has ended without success; the text says why."""


class Job:
    """One GRPOJob, and the objects that were in its file.

    `namespace`, `kubeconfig` and `context` choose the cluster, as kubectl's options do.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        **spec: Any,
    ) -> None:
        """Make a job of the fields of its spec: `training=TrainingConfig(max_steps=5)`, or a mapping as in YAML.

        Raises ValueError naming each wrong field.
        """
        document = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name},
            "spec": {to_camel(field): _plain(value) for field, value in spec.items()},
        }
        self._set([read_job(document)], namespace, kubeconfig, context)

    @classmethod
    def from_yaml(cls, file: str | Path, **cluster: str | None) -> Self:
        """Return the only job of a file; `submit` sends the file's other objects, too. Raises CliError."""
        return cls._of(load_documents(Path(file)), **cluster)

    @classmethod
    def from_cluster(cls, name: str, **cluster: str | None) -> Self:
        """Return a job that was submitted before. Raises CliError."""
        from grpo_cli.cluster.api_errors import explained
        from grpo_cli.cluster.kube import connect

        with explained():
            kube = connect(cluster.get("kubeconfig"), cluster.get("context"), cluster.get("namespace"))
            stored = kube.job(name)
        written = {key: stored[key] for key in ("apiVersion", "kind", "spec")}
        return cls._of([read_job(written | {"metadata": {"name": name, "namespace": kube.namespace}})], **cluster)

    @classmethod
    def from_trl(
        cls,
        config: object,
        *,
        model: str,
        dataset: str,
        rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        name: str | None = None,
        gpus: int | None = None,
        rows: int | None = None,
        **cluster: str | None,
    ) -> Self:
        """Return the job that does what a GRPOConfig says, as `grpo convert` does; what has no place is warned of.

        Rewards are functions of modules, or their names: one, or several. `gpus` are those of the node, `rows` those
        of the dataset. Raises ValueError.
        """
        from grpo_cli.convert.config import job_of

        text = job_of(config, model, dataset, rewards, name, gpus=gpus, rows=rows)
        job = cls._of(read_documents(text, "TRL"), **cluster)
        job._text = text
        return job

    @classmethod
    def _of(cls, documents: Sequence[Document | JobDocument], **cluster: str | None) -> Self:
        job = cls.__new__(cls)
        job._set(documents, **cluster)
        return job

    def _set(
        self,
        documents: Sequence[Document | JobDocument],
        namespace: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
    ) -> None:
        self._documents, self._job = documents, only_job(documents, "a Job")
        self._text: str | None = None  # of the manifest, where it has comments
        self._cluster = (kubeconfig, context, namespace)
        self._folder: Path | None = None  # of a local run
        self._in_cluster = RowsInCluster()

    @property
    def name(self) -> str:
        """Name of the job."""
        return self._job.name

    @property
    def spec(self) -> GRPOJobSpec:
        """The job's spec, with all defaults."""
        return self._job.spec

    def to_yaml(self) -> str:
        """Return the manifest, for `kubectl apply` and `grpo submit`; of TRL's configuration, with its comments."""
        if self._text is not None:
            return self._text
        documents = [one.document if isinstance(one, JobDocument) else one for one in self._documents]
        return write_yaml(documents)

    def submit(self, *, force: bool = False, show: Callable[[str], object] = print) -> Self:
        """Create or change the job, and the other objects of its file. `force` takes over fields of others.

        Raises CliError.
        """
        from grpo_cli.cluster import submission

        with self._kube(of_job=False) as kube:
            for what, is_new in submission.submit(kube, self._documents, f"job {self.name}", force=force):
                show(f"{what} {'created' if is_new else 'applied'}")
        self._folder = None
        return self

    def wait(self, timeout: float | None = None) -> Self:
        """Print a line for each change until the submitted job has ended.

        Raises JobFailedError; TimeoutError after `timeout` seconds, when the job continues; CliError.
        """
        from rich.console import Console

        from grpo_cli.cluster.job_reader import JobReader
        from grpo_cli.commands.follow import follow

        out = Console(force_terminal=False, force_jupyter=False, soft_wrap=True)
        with self._kube() as kube:
            try:
                follow(JobReader(kube, self.name), out, timeout=timeout, refused_is_end=True)
            except CliError as error:
                if error.exit_code == Exit.DEADLINE:
                    raise TimeoutError(error.message.removeprefix("--")) from error
                if error.exit_code in (Exit.FAILED, Exit.INVALID):
                    raise JobFailedError(error.message) from error
                raise
        return self

    def run(
        self, output: str | Path = "grpo-run", *, timeout: float | None = None, show: Callable[[str], object] = print
    ) -> Self:
        """Run the job's pods as processes of this machine, as `grpo run` does, in a new folder below `output`.

        Raises JobFailedError; TimeoutError after `timeout` seconds, when the processes have been ended.
        """
        Path(output).mkdir(parents=True, exist_ok=True)
        self._folder = folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=output)).resolve()
        (manifest := folder / "job.yaml").write_text(self.to_yaml())
        command = [sys.executable, "-m", "grpo_cli", "run", str(manifest), "--output", str(folder)]
        last = ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            timer = threading.Timer(timeout or 0, process.terminate)
            if timeout is not None:
                timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    show(last := line.rstrip("\n"))
            except BaseException:  # Ctrl-C of a notebook reaches this process alone
                process.terminate()
                raise
            finally:
                is_late = timeout is not None and not timer.is_alive()
                timer.cancel()  # or Python would not end before it
        if is_late and process.returncode:
            raise TimeoutError(f"timeout {timeout:.0f} s has passed: the processes were ended; logs are in {folder}")
        if process.returncode:
            raise JobFailedError(f"job {self.name} ended with {process.returncode}: {last}; logs are in {folder}")
        return self

    def metrics(self) -> Rows:
        """Return the metrics of each step, of the last `run`, or else of the job in the cluster. Raises CliError."""
        return table(self._rows("metrics"))

    def completions(self) -> Rows:
        """Return the completions that are kept for reading; it warns where older ones are left out. Raises CliError."""
        return table(self._rows("completions"))

    def export(self, folder: str | Path) -> Path:
        """Copy the newest exported model, of the last `run` or of the job in the cluster, to `folder`.

        Raises CliError.
        """
        if self._folder is not None:
            from grpo_cli.ui.folder import run_folder

            exports = (run_folder(self._folder) / "exports").glob("step-*")
            models = sorted(exports, key=lambda path: int(path.name.removeprefix("step-")))
            if not models:
                raise CliError(f"the run in {self._folder} exported no model: set storage.export", Exit.NOT_FOUND)
            return Path(shutil.copytree(models[-1], folder, dirs_exist_ok=True))
        from grpo_cli.commands.copy import Place, copy_files, exported

        with self._kube() as kube:
            found = kube.job(self.name)
            copy_files(kube, exported(found), Place(None, str(folder)), image=None, job=found)
        return Path(folder)

    @contextmanager
    def _kube(self, *, of_job: bool = True) -> Iterator[Kube]:
        """Connect: to the job's namespace, or to that where documents go that name none."""
        from grpo_cli.cluster.api_errors import explained
        from grpo_cli.cluster.kube import connect

        with explained():
            kube = connect(*self._cluster)
            own = self._job.document["metadata"].get("namespace") or kube.namespace
            if kube.is_asked_for and own != kube.namespace:
                said = f"job {self.name} is of namespace {own}, and namespace is {kube.namespace}: leave one out"
                raise CliError(said, Exit.INVALID)
            if of_job:
                kube.namespace = own
            yield kube

    def _rows(self, what: str) -> list[Any]:
        from grpo_cli.ui.folder import FolderSource, run_folder
        from grpo_cli.ui.source import SourceError

        try:
            if self._folder is not None:
                source = FolderSource(run_folder(self._folder))
                source.refresh()
                return rows_of(source.shown.history, what)
            with self._kube() as kube:
                return self._in_cluster.read(kube, self.name, what)
        except SourceError as error:
            raise CliError(str(error), Exit.NOT_FOUND) from error


def _plain(value: Any) -> Any:
    """Return a section as it is written in YAML; fields that nobody set are left out."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
