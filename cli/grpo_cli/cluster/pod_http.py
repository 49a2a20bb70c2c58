"""HTTP requests to a pod through a port-forward, which needs no route and passes NetworkPolicies."""

from __future__ import annotations

import http.client
import json
from typing import Any, cast

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward

SECONDS = 5.0


class PodError(Exception):
    """A pod did not answer; the text says why."""


class NotAllowedError(PodError):
    """The user of the command may not connect to pods."""


class _Forwarding:
    """The method of an object with `api_client` that `portforward` needs; importing CoreV1Api takes a second."""

    def __init__(self, api: client.ApiClient) -> None:
        self.api_client = api

    def connect(self, namespace: str, pod: str, port: int, *, _preload_content: bool) -> Any:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward"
        request = self.api_client.param_serialize(
            "GET", path, query_params=[("ports", str(port))], auth_settings=["BearerToken"]
        )
        return self.api_client.call_api(*request).response


class ForwardedConnection(http.client.HTTPConnection):
    """A connection to a pod's port. It is forwarded once: a request after it was closed raises."""

    def __init__(self, api: client.ApiClient, namespace: str, pod: str, port: int, *, seconds: float = SECONDS) -> None:
        """Begin to forward; `seconds`: how long to wait for the pod to send or take bytes. Raises PodError."""
        super().__init__("localhost", timeout=seconds)
        try:
            self._forward = portforward(_Forwarding(api).connect, namespace, pod, port)
        except ApiException as error:
            raise _refusal(pod, error) from error
        self._forwarded = port
        self.sock = self._forward.socket(port)
        self.sock.settimeout(seconds)
        self.auto_open = 0

    @property
    def said(self) -> str | None:
        """What the node said of the port, if it could not connect to it."""
        return cast(str | None, self._forward.error(self._forwarded))


def get_json(api: client.ApiClient, namespace: str, pod: str, port: int, path: str) -> Any:
    """Return the JSON at `path` of a pod's port. Raises PodError saying why there is none."""
    connection = ForwardedConnection(api, namespace, pod, port)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise PodError(f"pod {pod} does not answer: {connection.said or error!r}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise PodError(f"pod {pod} answers {answer.status}: {body.decode(errors='replace').strip()}")
    return json.loads(body)


def _refusal(pod: str, error: ApiException) -> PodError:
    # The failed websocket handshake has the answer only as text: status 0, "Handshake status 403 Forbidden -+-+- ...".
    said = str(error.reason).partition(" -+-+- ")[0].removeprefix("Handshake status ")
    if said.startswith("403"):
        return NotAllowedError(f"you may not forward ports of pod {pod}: ask for a role with pods/portforward")
    return PodError(f"no connection to pod {pod} through the API server and its node: {said}")
