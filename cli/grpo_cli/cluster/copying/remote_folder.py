"""The folder that a pod of `grpo cp` serves, through a connection that is made again when it breaks."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from grpo_cli.cluster.pod_http import NotAllowedError, PodError

PATIENCE_SECONDS = 120.0
"""Stop trying when the pod has not answered for this long; an API server that is upgraded takes less."""
PAUSE_SECONDS = 1.0


class ClaimError(OSError):
    """An error of the claim's file system, as the pod reports it."""


class RemoteFolder:
    """`folder.Folder` over HTTP. All its operations may be repeated, so one whose answer is lost is.

    Methods raise ClaimError where `Folder` raises OSError; PodError if nobody answers for PATIENCE_SECONDS.
    """

    def __init__(self, connect: Callable[[], http.client.HTTPConnection], check: Callable[[], None]) -> None:
        """Use the connections of `connect`; `check` raises why there can be no further one."""
        self._connect, self._check = connect, check
        self._connection: http.client.HTTPConnection | None = None

    def kind(self, path: str) -> str:
        """See `Folder.kind`."""
        return str(json.loads(self._ask("kind", path)))

    def look(self, path: str) -> dict[str, Any]:
        """See `Folder.look`."""
        return dict(json.loads(self._ask("look", path)))

    def digest(self, path: str, offset: int, length: int, *, of_part: bool) -> str:
        """See `Folder.digest`."""
        return str(json.loads(self._ask("digest", path, offset=offset, length=length, of_part=of_part)))

    def read(self, path: str, offset: int, length: int) -> bytes:
        """See `Folder.read`."""
        return self._ask("read", path, offset=offset, length=length)

    def write(self, path: str, offset: int, data: bytes) -> str:
        """See `Folder.write`."""
        return str(json.loads(self._ask("write", path, data, offset=offset)))

    def publish(self, path: str, size: int) -> None:
        """See `Folder.publish`."""
        self._ask("publish", path, size=size)

    def close(self) -> None:
        """Close the connection; the next operation makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, operation: str, path: str, body: bytes = b"", **query: int) -> bytes:
        url = f"/{operation}?{urlencode({'path': path, **query})}"
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.request("POST", url, body)
                answer = self._connection.getresponse()
                data = answer.read()
                break
            except NotAllowedError:
                raise
            except (OSError, http.client.HTTPException, PodError) as error:
                self.close()
                self._check()
                if time.monotonic() > until:
                    raise PodError(f"no answer for {PATIENCE_SECONDS:.0f} s: {error}") from error
                time.sleep(PAUSE_SECONDS)
        if answer.status == http.client.OK:
            return data
        said = json.loads(data)
        free = "" if said["free"] is None else f"; {said['free']:,} bytes are free"
        raise ClaimError(said["errno"], f"{said['text']}{free}", path)
