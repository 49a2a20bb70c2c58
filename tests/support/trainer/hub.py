"""A small hub on loopback, which the real client of the hub asks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """A hub with one repository, `org/model` or `datasets/org/rows`; its branch `main` is at `branch`.

    Of a file that is `halted` it sends half and waits.
    """

    def __init__(self, repository: str, commits: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository, self.commits, self.branch = repository, commits, next(iter(commits))
        self.asked: list[str] = []
        self.sent: list[str] = []
        self.halted = ""

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        """Answer in a thread."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        yield self
        self.halted = ""
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers like the hub."""

    server: Hub

    def do_GET(self) -> None:
        """See the hub's API: <repository>/resolve/<revision>/<file>, api/.../tree/<revision>, api/...[/<revision>]."""
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0].strip("/").removeprefix("api/").removeprefix("models/")
        if not path.startswith(self.server.repository):
            self._send(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})
            return
        kind, revision, *folders = [*path.removeprefix(self.server.repository).strip("/").split("/"), "main"]
        name, commit = "/".join(folders[:-1]), self.server.branch if revision == "main" else revision
        if (files := self.server.commits.get(commit)) is None:
            self._send(b"{}", 404, **{"X-Error-Code": "RevisionNotFound"})
        elif kind == "resolve" and name not in files:
            self._send(b"", 404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        elif kind == "resolve":
            self._send(files[name], name=name, **{"ETag": f'"{name}-{commit}"', "X-Repo-Commit": commit})
        elif kind == "tree":
            tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": file} for file in files]
            self._send(json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": file, "size": len(files[file])} for file in files]
            self._send(json.dumps({"id": self.server.repository, "sha": commit, "siblings": siblings}).encode())

    def do_HEAD(self) -> None:
        """The same, without a body."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing: the tests say what was asked."""

    def _send(self, content: bytes, code: int = 200, name: str = "", **headers: str) -> None:
        self.send_response(code)
        for header, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name:
            self.server.sent.append(name)
        is_halted = name and name == self.server.halted
        self.wfile.write(content[: len(content) // 2] if is_halted else content)
        self.wfile.flush()
        while is_halted and self.server.halted:
            time.sleep(0.05)
