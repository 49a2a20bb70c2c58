"""Requests to the API server: each has a deadline, waits as long as the server asks, and is counted."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.request import getproxies_environment

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError
from pydantic_core import from_json

from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.errors import EarlyError, ForbiddenError, is_early, is_forbidden, reason_of

Object = dict[str, Any]

DEADLINE_SECONDS = 15.0
"""Seconds for one request with all its repetitions; the client's own limit is five minutes."""

SILENCE_SECONDS = 150.0
"""Seconds without a byte after which a watch counts as broken. API servers send a bookmark about once a minute."""

_METHODS = {
    "get": "get",
    "list": "get",
    "create": "post",
    "dry-create": "post",
    "apply": "patch",
    "dry-apply": "patch",
    "scale": "patch",
    "patch": "patch",
    "relabel": "patch",
    "patch-status": "patch",
    "patch-fields": "patch",
    "update": "put",
    "delete": "delete",
}
"""HTTP method of each verb that metrics count; dry ones change nothing."""


async def configure(*, watches: int = 0) -> client.ApiClient:
    """Return a client for the cluster that this process runs in, else for the one in KUBECONFIG.

    Each of so many `watches` holds a connection besides those for requests.
    """
    configuration = client.Configuration()
    try:
        config.load_incluster_config(configuration)
    except ConfigException:
        await config.load_kube_config(client_configuration=configuration)
    configuration.connection_pool_maxsize += watches
    return connect(configuration)


def connect(configuration: client.Configuration) -> client.ApiClient:
    """Return a client for a cluster."""
    # aiohttp looks for a proxy and for .netrc in two threads before each request: more than half of a request's cost.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
    return client.ApiClient(configuration)


class Transport:
    """Sends requests to one API server.

    Methods raise ForbiddenError if the operator's roles do not allow the request, EarlyError if the API server does not
    know the CRD of an owner yet, ApiException if the API server fails
    or refuses, TimeoutError if it does not answer in time, and aiohttp.ClientError if it cannot be reached.
    """

    def __init__(
        self, api: client.ApiClient, instruments: Instruments, before_write: Callable[[], None] | None = None
    ) -> None:
        """`before_write` is called right before each request that changes something; it may raise."""
        # Bodies are JSON already. The library looks for times and models in them: up to a quarter of a request.
        plain = copy.copy(api)  # with the same connections
        plain.sanitize_for_serialization = lambda body: body
        self._dynamic, self._api, self._instruments = DynamicClient(plain), api, instruments
        self._before_write = before_write

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def request(self, verb: str, kind: str, path: str, **params: Any) -> Object:
        """Return the answer to a request.

        `verb` and `kind` are for metrics and messages; `params` are those of the client library's DynamicClient.

        While the API server says that it is busy (429, or 503 with Retry-After), the request is repeated after as many
        seconds as it asks for, until the deadline.
        """
        try:
            async with asyncio.timeout(DEADLINE_SECONDS) as deadline:
                while True:
                    try:
                        return await self._once(verb, kind, path, params)
                    except ApiException as error:
                        wait = _retry_after(error)
                        if wait is None or asyncio.get_running_loop().time() + wait >= (deadline.when() or 0):
                            raise
                    await asyncio.sleep(wait)
        except TimeoutError as error:
            raise TimeoutError(f"no answer to {verb} {kind} ({path}) within {DEADLINE_SECONDS:.0f} s") from error

    async def stream(self, path: str, query: list[tuple[str, str]]) -> AsyncIterator[Object]:
        """Yield the objects that a watch sends, until the API server ends it."""
        silence = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            answer = await self._dynamic.request(
                "get", path, serialize=False, query_params=[*query], header_params={}, _request_timeout=silence
            )
        except DynamicApiError as error:
            raise _as_error(error, "watch", path.rpartition("/")[2], path) from error
        try:
            while line := await answer.content.readline():
                yield from_json(line)
        finally:
            answer.close()

    async def _once(self, verb: str, kind: str, path: str, params: Object) -> Object:
        if self._before_write is not None and _METHODS[verb] != "get":
            self._before_write()
        code = None
        try:
            answer = await self._dynamic.request(
                _METHODS[verb], path, serialize=False, **({"query_params": [], "header_params": {}} | params)
            )
            code = answer.status
            body = from_json(await answer.read())
        except DynamicApiError as error:
            code = error.status
            raise _as_error(error, verb, kind, path) from error
        except ValueError as error:
            raise aiohttp.ClientPayloadError(f"the answer to {verb} {kind} ({path}) is no JSON: {error}") from error
        finally:
            self._instruments.requested(verb, kind, code)
        assert isinstance(body, dict)
        return body


def _as_error(error: DynamicApiError, verb: str, kind: str, path: str) -> Exception:
    failed = ApiException(status=error.status, reason=error.reason, body=error.body)
    failed.headers = error.headers
    if is_early(failed):
        return EarlyError()
    return ForbiddenError(verb, kind, path, reason_of(failed)) if is_forbidden(failed) else failed


def _retry_after(error: ApiException) -> float | None:
    """Return the seconds after which a request may be repeated because the server was busy, else None."""
    asked = (error.headers or {}).get("Retry-After")
    if error.status not in (429, 503) or (asked is None and error.status == 503):
        return None
    seconds = float(asked) if asked is not None and str(asked).isdecimal() else 1.0
    return seconds * random.uniform(1.0, 1.5)
