"""Datasets in object storage: copied into the cache, and read from there like any other."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from filelock import FileLock
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem, copy_files

from grpo_spec.object_storage import CREDENTIALS, REFUSED


def fetch(url: str, cache: Path) -> Path:
    """Return the copy in `cache` of a file or folder in object storage, made by the first rank that asks for it.

    What has changed since has another size or time, and gets a new copy.

    Raises:
        FileNotFoundError: nothing has this name, or the storage refuses.
        OSError: trying again may help.
    """
    try:
        storage, source = FileSystem.from_uri(url.rstrip("/"))
        found = storage.get_file_info(source)
        files = [found]
        if found.type is FileType.Directory:
            files = storage.get_file_info(FileSelector(source, recursive=True))
        files = [file for file in files if file.type is FileType.File]
        if not files:
            raise FileNotFoundError("there is no such bucket, or it has nothing of this name")
        state = "\n".join(sorted(f"{file.path} {file.size} {file.mtime_ns}" for file in files))
        copy = cache / "buckets" / hashlib.sha256(f"{url}\n{state}".encode()).hexdigest()[:32]
        copy.mkdir(parents=True, exist_ok=True)
        with FileLock(copy / "lock"):
            whole, scratch = copy / Path(source).name, copy / "unfinished"
            if not whole.exists():
                shutil.rmtree(scratch, ignore_errors=True)
                (scratch / whole.name if found.type is FileType.Directory else scratch).mkdir(parents=True)
                copy_files(source, str(scratch / whole.name), storage, LocalFileSystem())
                (scratch / whole.name).rename(whole)
    except OSError as error:
        if REFUSED.search(str(error)):
            raise FileNotFoundError(f"{error}. {CREDENTIALS}") from None
        raise
    return whole
