"""HTTP requests to a launcher through a port-forward, which needs no route and passes NetworkPolicies."""

from __future__ import annotations

import http.client
import json
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward

SECONDS = 5.0


class PodError(Exception):
    """A pod did not answer; the text says why."""


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


def get_json(api: client.ApiClient, namespace: str, pod: str, port: int, path: str) -> Any:
    """Return the JSON at `path` of a pod's port. Raises PodError saying why there is none."""
    try:
        forward = portforward(_Forwarding(api).connect, namespace, pod, port)
    except ApiException as error:
        raise PodError(_refusal(pod, error)) from error
    connection = http.client.HTTPConnection("launcher", timeout=SECONDS)
    connection.sock = forward.socket(port)
    connection.sock.settimeout(SECONDS)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise PodError(f"pod {pod} does not answer: {forward.error(port) or error!r}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise PodError(f"pod {pod} answers {answer.status}: {body.decode(errors='replace').strip()}")
    return json.loads(body)


def _refusal(pod: str, error: ApiException) -> str:
    # The failed websocket handshake has the answer only as text: status 0, "Handshake status 403 Forbidden -+-+- ...".
    said = str(error.reason).partition(" -+-+- ")[0].removeprefix("Handshake status ")
    if said.startswith("403"):
        return f"you may not forward ports of pod {pod}: ask for a role with pods/portforward"
    return f"no connection to pod {pod} through the API server and its node: {said}"
