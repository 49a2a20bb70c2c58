"""A folder whose files are read, written and compared by parts.

`grpo cp` uses it for this machine, and starts it as a program in the pod that mounts a claim: the pod gets this file as
text, so any image with Python will do, and it imports only what Python has.

    python folder.py ROOT PORT IDLE_SECONDS    serves ROOT on the loopback, until nobody has asked for so long
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, urlsplit

PART = ".grpo-cp"
"""The end of the name of a file that is not whole yet: .NAME.grpo-cp, beside its place."""
SHOWN = 10
"""Number of names that an answer about a path that does not exist holds."""


class Folder:
    """The files below `root`; paths are relative to it, with `/`. Methods raise OSError; ValueError for one outside."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def kind(self, path: str) -> str:
        """Return whether a file, a folder or none is at `path`."""
        at = self._at(path)
        return "file" if at.is_file() else "folder" if at.is_dir() else "none"

    def look(self, path: str) -> dict[str, Any]:
        """Return what is at `path`.

        `kind` is file, folder or none. `files` has the size of each file by its path below `path` (that of a file is
        empty), `parts` the same of files that are not whole. `near`, for none: the first existing folder above, and
        names in it.
        """
        at = self._at(path)
        if at.is_file():
            return {"kind": "file", "files": {"": at.stat().st_size}, "parts": self._part_of(at)}
        if not at.is_dir():
            above = next(one for one in at.parents if one.is_dir())
            shown = sorted(one.name for one in above.iterdir() if not one.name.endswith(PART))[:SHOWN]
            near = [above.relative_to(self._root).as_posix(), shown]
            return {"kind": "none", "files": {}, "parts": self._part_of(at), "near": near}
        files, parts = {}, {}
        for file in _files(at):
            below, size = file.relative_to(at), file.stat().st_size
            if file.name.startswith(".") and file.name.endswith(PART):
                parts[below.with_name(file.name[1 : -len(PART)]).as_posix()] = size
            else:
                files[below.as_posix()] = size
        return {"kind": "folder", "files": files, "parts": parts}

    def digest(self, path: str, offset: int, length: int, *, of_part: bool) -> str:
        """Return the SHA-256 of some bytes of a file, or of the part of it that is there."""
        at = self._at(path)
        return hashlib.sha256(_bytes(_part(at) if of_part else at, offset, length)).hexdigest()

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return some bytes of a file; fewer where it ends."""
        return _bytes(self._at(path), offset, length)

    def write(self, path: str, offset: int, data: bytes) -> str:
        """Write bytes of a file that is not whole yet; return the SHA-256 of what can then be read there.

        OSError where it would leave a hole: another copy has given the part the file's name, or made it shorter.
        """
        part = _part(self._at(path))
        part.parent.mkdir(parents=True, exist_ok=True)
        if offset > (part.stat().st_size if part.exists() else 0):
            raise OSError(errno.EBUSY, "another copy writes the same file; wait for it, and copy again")
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.seek(offset)
            file.write(data)
        return hashlib.sha256(_bytes(part, offset, len(data))).hexdigest()

    def publish(self, path: str, size: int) -> None:
        """Give a file that is whole now its name, once it is on the disk; a second time, nothing happens."""
        at = self._at(path)
        part = _part(at)
        if not part.exists() and at.is_file() and at.stat().st_size == size:
            return
        with part.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
        part.replace(at)

    def free(self) -> int:
        """Return the bytes that are free."""
        return shutil.disk_usage(self._root).free

    def _at(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if ".." in parts or path.startswith("/"):
            raise ValueError(f"{path} leaves the folder")
        return self._root.joinpath(*parts)

    def _part_of(self, at: Path) -> dict[str, int]:
        part = _part(at) if at != self._root else None
        return {"": part.stat().st_size} if part and part.is_file() else {}


def _part(file: Path) -> Path:
    return file.with_name(f".{file.name}{PART}")


def _bytes(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(length)


def _files(folder: Path) -> list[Path]:
    """Return all files below a folder, also through links; a folder that cannot be read is an error."""

    def refuse(error: OSError) -> None:
        if os.path.basename(error.filename or "") != "lost+found":  # of the file system, and only root's
            raise error

    found = []
    for where, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        found += [file for file in (Path(where, name) for name in names) if file.exists()]  # no link to nothing
        links = [Path(where, name) for name in folders if os.path.islink(os.path.join(where, name))]
        circles = {link.name for link in links if link.resolve() in [above.resolve() for above in link.parents]}
        folders[:] = [name for name in folders if name not in circles]
    return sorted(found)


class _Server(ThreadingHTTPServer):
    """Serves the operations of one folder, each as a path, with their arguments in the query."""

    daemon_threads = True

    def __init__(self, folder: Folder, port: int) -> None:
        self.folder, self.asked = folder, time.monotonic()
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, *_: object) -> None:
        """Write one line where http.server has a traceback: connections end as they like."""
        print(f"a connection ended: {sys.exc_info()[1]!r}", flush=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.server.asked = time.monotonic()
        asked = urlsplit(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, answer = 200, self._answer(asked.path, dict(parse_qsl(asked.query, keep_blank_values=True)), body)
        except (OSError, ValueError) as error:
            said = {"errno": getattr(error, "errno", None), "text": getattr(error, "strerror", None) or str(error)}
            full = said["errno"] in (errno.ENOSPC, errno.EDQUOT)
            status, answer = 409, {**said, "free": self.server.folder.free() if full else None}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, operation: str, query: dict[str, str], body: bytes) -> Any:
        folder, path = self.server.folder, query["path"]
        numbers = {name: int(query[name]) for name in ("offset", "length", "size") if name in query}
        if operation == "/kind":
            return folder.kind(path)
        if operation == "/look":
            return folder.look(path)
        if operation == "/digest":
            return folder.digest(path, **numbers, of_part=query["of_part"] == "True")
        if operation == "/read":
            return folder.read(path, **numbers)
        if operation == "/write":
            return folder.write(path, **numbers, data=body)
        if operation == "/publish":
            return folder.publish(path, **numbers)
        raise ValueError(f"{operation} is no operation")

    def log_message(self, *_: object) -> None:
        """Write nothing for each request."""


def main(root: str, port: str, idle_seconds: str) -> None:
    """Serve a folder until nobody has asked for `idle_seconds`."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # of process 1, the kernel would ignore it
    server = _Server(Folder(root), int(port))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving {root}", flush=True)
    while (left := server.asked + float(idle_seconds) - time.monotonic()) > 0:
        time.sleep(left)
    print(f"nobody has asked for {idle_seconds} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
