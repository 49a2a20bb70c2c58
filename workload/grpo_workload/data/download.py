"""Download a job's model and datasets into the cache before its GPUs are asked for, and say how far it is.

Files that are whole in the cache are not downloaded again, so a pod that replaces another one continues file by file.
GET /progress has the bytes so far in `phase`. Exit codes: 0 when all is there, 64 (ConfigError) when the hub does not
have it or does not give it, and 1 for everything that may pass, such as a connection that breaks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import DryRunFileInfo

from grpo_spec.contract import ENV_TERMINATION_LOG, TERMINATION_LOG, DatasetName, Downloads
from grpo_spec.errors import ConfigError
from grpo_spec.reports import ExitCode, Progress

OTHER_WEIGHTS = (
    *("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.tflite"),
    *("original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"),
)
"""Files of a model with safetensors that neither transformers nor vLLM reads then."""

MAX_MESSAGE = 1024
"""Characters of a termination message, of whose bytes Kubernetes keeps 4096."""

logger = logging.getLogger(__name__)


Check = Callable[[Downloads], None]
"""Looks at the model's config.json, which is in the cache; raises ConfigError if the job cannot run."""


def main(wanted: str, check: Check) -> int:
    """Download what the JSON of a `Downloads` names; return the exit code. `check` comes before weights."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        asyncio.run(_serve_and_download(Downloads.model_validate_json(wanted), check))
    except ConfigError as error:
        return _end(str(error), ExitCode.CONFIG_ERROR)
    except OSError as error:  # the hub cannot be reached or is overloaded, the disk is full
        return _end(f"{type(error).__name__}: {error}", 1)
    except Exception as error:
        logger.exception("the download failed")
        return _end(f"{type(error).__name__}: {error}", 1)
    return 0


def _end(why: str, exit_code: int) -> int:
    """Leave the reason in the log and, by itself, where the operator reads it."""
    why = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", why)  # it may be signed, and events are read by many
    logger.error("%s", why)
    Path(os.environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)).write_text(why[:MAX_MESSAGE])
    return exit_code


async def _serve_and_download(wanted: Downloads, check: Check) -> None:
    say: Callable[[], str] = "Starting".format

    async def answer(_: web.Request) -> web.Response:
        text = Progress(phase=await asyncio.to_thread(say)).model_dump_json(by_alias=True, exclude_none=True)
        return web.Response(text=text, content_type="application/json")

    application = web.Application()
    application.router.add_get("/progress", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, port=wanted.status_port).start()
    try:
        if wanted.model is not None:
            model = Model(wanted.model, wanted.revision)
            await asyncio.to_thread(model.look)
            await asyncio.to_thread(model.download, "config.json")
            say = "checks whether the job fits its GPUs".format
            await asyncio.to_thread(check, wanted)
            say = model.progress
            logger.info("%s", say())
            await asyncio.to_thread(model.download)
            logger.info("%s", say())
        for dataset in wanted.datasets:
            say = f"prepares the dataset {dataset.name}".format
            logger.info("%s", say())
            await asyncio.to_thread(_prepare, dataset)
    finally:
        await runner.cleanup()


class Model:
    """A model of the hub, and its files in the cache."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name, self._revision, self._ignored = name, revision, [""]
        self._files: list[DryRunFileInfo] = []
        self._began = time.time()

    def look(self) -> None:
        """Ask the hub for the files.

        Raises:
            ConfigError: the hub does not have the model or does not give it; names the field.
        """
        try:
            names = [file.rfilename for file in HfApi().model_info(self.name, revision=self._revision).siblings or ()]
        except RevisionNotFoundError as error:
            raise ConfigError(f"model.revision: {self.name} has no {self._revision}: {error}") from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise ConfigError(f"model.name: cannot load {self.name}: {error}") from error
        if any(name.endswith(".safetensors") for name in names):
            self._ignored = [*OTHER_WEIGHTS]
        files = self._snapshot(dry_run=True)
        assert isinstance(files, list)
        self._files = files

    def download(self, only: str | None = None) -> None:
        """Download files that are not in the cache, or `only` one. ConfigError if the token may not read them."""
        try:
            self._snapshot(dry_run=False, only=only)
        except GatedRepoError as error:
            raise ConfigError(f"model.name: cannot load {self.name}: {error}") from error

    def progress(self) -> str:
        """Say how much of the model is in the cache."""
        paths = [Path(file.local_path) for file in self._files]
        there = sum(file.file_size or 0 for file, path in zip(self._files, paths, strict=True) if path.exists())
        # Files of a process that was killed are not continued: the hub's client begins each such file again.
        blobs = paths[0].parents[len(Path(self._files[0].filename).parts) + 1] / "blobs" if paths else Path()
        there += sum(size for size, written in map(_size, blobs.glob("*.incomplete")) if written >= self._began)
        total = sum(file.file_size or 0 for file in self._files)
        return f"downloads {self.name}: {min(there, total) / 1e9:.2f} of {total / 1e9:.2f} GB"

    def _snapshot(self, *, dry_run: bool, only: str | None = None) -> str | list[DryRunFileInfo]:
        return snapshot_download(
            self.name,
            revision=self._revision,
            allow_patterns=only,
            ignore_patterns=self._ignored,
            dry_run=dry_run,
        )


def _size(path: Path) -> tuple[int, float]:
    """Return a file's size and the time of its last change; 0 if it has just been renamed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0.0
    return found.st_size, found.st_mtime


def _prepare(dataset: DatasetName) -> None:
    import datasets  # It takes seconds, and a job may have none of the hub.

    try:
        datasets.load_dataset(dataset.name, dataset.config, revision=dataset.revision, split=dataset.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ConfigError(f"dataset.name: cannot load {dataset.name}: {error}") from error
