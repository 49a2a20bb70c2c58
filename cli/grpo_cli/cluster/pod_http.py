"""HTTP requests to a pod through a port-forward, which needs no route and passes NetworkPolicies.

The client's own `portforward` copies bytes in a thread, of which a lost connection leaves a traceback on the terminal
and a request that waits. HTTP sends and receives in turns, so here each call reads or writes the websocket itself.
"""

from __future__ import annotations

import http.client
import io
import json
from typing import Any

from kubernetes import client
from kubernetes.stream.ws_client import ABNF, create_websocket, get_websocket_url

SECONDS = 5.0
FRAME_BYTES = 1 << 18
DATA, ERROR = 0, 1
"""Channels of the one port; each begins with a frame that holds the port's number."""


class PodError(Exception):
    """A pod did not answer; the text says why."""


class NotAllowedError(PodError):
    """The user of the command may not connect to pods."""


class ForwardedConnection(http.client.HTTPConnection):
    """A connection to a pod's port. It is forwarded once: a request after it was closed raises."""

    auto_open = 0

    def __init__(self, api: client.ApiClient, namespace: str, pod: str, port: int, *, seconds: float = SECONDS) -> None:
        """Begin to forward; `seconds`: how long to wait for the pod to send or take bytes. Raises PodError."""
        super().__init__("localhost")
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward"
        ports, auth = [("ports", str(port))], ["BearerToken"]
        _, url, headers, *_ = api.param_serialize("GET", path, query_params=ports, auth_settings=auth)
        try:
            websocket = create_websocket(api.configuration, get_websocket_url(url), headers)
        except Exception as error:  # the websocket's classes are not the client's, which has no words for them either
            raise _refusal(pod, error) from error
        websocket.settimeout(seconds)
        self.sock: Any = _Socket(websocket)


class _Socket:
    """The part of a socket that `http.client` needs. Failures are ConnectionErrors."""

    def __init__(self, websocket: Any) -> None:
        self._websocket, self._rest, self._begun = websocket, b"", {DATA: False, ERROR: False}
        self._users = 1  # the connection, and the answers that are read: http.client closes it before these

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._users += 1
        return io.BufferedReader(_Stream(self), FRAME_BYTES)

    def sendall(self, data: bytes) -> None:
        try:
            for begin in range(0, len(data), FRAME_BYTES):
                self._websocket.send_binary(bytes([DATA]) + data[begin : begin + FRAME_BYTES])
        except Exception as error:
            raise ConnectionError(str(error)) from error

    def receive(self, most: int) -> bytes:
        """Return the next bytes, at most so many; none at the end."""
        while not self._rest:
            try:
                opcode, frame = self._websocket.recv_data_frame(True)
            except Exception as error:
                raise ConnectionError(str(error)) from error
            if opcode == ABNF.OPCODE_CLOSE:
                return b""
            if opcode != ABNF.OPCODE_BINARY or not frame.data:
                continue
            channel, data = frame.data[0], frame.data[1:]
            if not self._begun[channel]:
                self._begun[channel] = True
            elif channel == ERROR:
                raise ConnectionError(data.decode(errors="replace"))
            else:
                self._rest = data
        data, self._rest = self._rest[:most], self._rest[most:]
        return data

    def close(self) -> None:
        self._users -= 1
        if not self._users:
            self._websocket.shutdown()


class _Stream(io.RawIOBase):
    def __init__(self, socket: _Socket) -> None:
        self._socket = socket

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._socket.close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._socket.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def get_json(api: client.ApiClient, namespace: str, pod: str, port: int, path: str) -> Any:
    """Return the JSON at `path` of a pod's port. Raises PodError saying why there is none."""
    connection = ForwardedConnection(api, namespace, pod, port)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise PodError(f"pod {pod} does not answer: {str(error) or repr(error)}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise PodError(f"pod {pod} answers {answer.status}: {body.decode(errors='replace').strip()}")
    return json.loads(body)


def _refusal(pod: str, error: Exception) -> PodError:
    # A failed handshake has the answer only as text: "Handshake status 403 Forbidden -+-+- ...".
    said = str(error).partition(" -+-+- ")[0].removeprefix("Handshake status ")
    if said.startswith("403"):
        return NotAllowedError(f"you may not forward ports of pod {pod}: ask for a role with pods/portforward")
    return PodError(f"no connection to pod {pod} through the API server and its node: {said}")
