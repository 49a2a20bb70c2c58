"""Whether an installation works: what the operator needs to begin, and `python -m grpo_operator check`.

`helm test` runs the latter, with the right to list pods only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Any

import aiohttp

from grpo_operator.api import names
from grpo_operator.api.crd import crd
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ForbiddenError, expected
from grpo_operator.runtime.scopes import scopes, site_kinds
from grpo_operator.runtime.transport import Transport, configure

Schema = dict[str, Any]
SHOWN = 5
"""Number of missing fields that a complaint names."""


def fields(schema: Schema, prefix: str = "") -> Iterator[str]:
    """Yield every field of a structural schema as a path: `spec.trainer.groups.gpus`."""
    for name, child in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield path
        yield from fields(child.get("items", child), f"{path}.")


def missing_fields(served: Schema) -> list[str]:
    """Return the fields of this operator's GRPOJob that the API server does not know, and silently drops from jobs."""
    wanted = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    own = {"properties": {part: wanted[part] for part in ("spec", "status")}}
    known = set(fields(served))
    return [path for path in fields(own) if path not in known]


async def find_missing(cluster: Cluster, namespaces: Collection[str]) -> str | None:
    """Return what an operator of these namespaces (of all, if there are none) lacks to begin, in one line with what to
    do, or None. What passes need beyond that, they say themselves.
    """
    lacking: dict[str, ForbiddenError] = {}
    try:
        if not await cluster.serves(names.KIND):
            return f"the cluster has no CRD {names.PLURAL}.{names.GROUP}: kubectl apply --server-side -f crds/"
        site = [kind for kind in site_kinds(namespaces) if await cluster.serves(kind)]
        for scope in scopes(namespaces, (names.KIND, *names.WATCHED_KINDS, *site)):
            try:
                await cluster.page(scope.kind, scope.namespace, "", 1, "")
            except ForbiddenError as error:
                lacking.setdefault(scope.kind, error)
    except Exception as error:
        if (known := expected(error)) is None:
            raise
        return known.text
    if not lacking:
        return None
    roles = "apply the chart's roles and their bindings (helm upgrade --install does)"
    said = next(iter(lacking.values())).said
    return f"the operator's ServiceAccount may not list {', '.join(lacking)}; {roles}: {said}"


async def check(namespace: str, selector: str, port: int, seconds: float) -> list[str]:
    """Return what is wrong, one line each. Checks again every second until nothing is wrong, for at most `seconds`."""
    cluster = Cluster(Transport(await configure(), Instruments()))
    try:
        end = asyncio.get_running_loop().time() + seconds
        while True:
            wrong = [*await _crd(cluster), *await _operator(cluster, namespace, selector, port)]
            if not wrong or asyncio.get_running_loop().time() > end:
                return wrong
            await asyncio.sleep(1)
    finally:
        await cluster.close()


async def lacking_fields(cluster: Cluster) -> list[str] | None:
    """Return the fields of this release that the API server drops; None while it does not describe GRPOJobs."""
    schemas: dict[str, Schema] = (await cluster.openapi()).get("components", {}).get("schemas", {})
    kinds = "x-kubernetes-group-version-kind"
    served = next((s for s in schemas.values() if any(kind["kind"] == names.KIND for kind in s.get(kinds, ()))), None)
    return None if served is None else missing_fields(served)


def describe_lack(missing: list[str]) -> str:
    """Return one line about these fields, with what to do."""
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    lacks = f"the CRD is older than this operator and lacks {', '.join(missing[:SHOWN])}{more}"
    return f"{lacks}: kubectl apply --server-side -f crds/"


async def _crd(cluster: Cluster) -> list[str]:
    if (missing := await lacking_fields(cluster)) is None:
        return [f"the API server does not serve {names.PLURAL}.{names.GROUP}: kubectl apply --server-side -f crds/"]
    return [describe_lack(missing)] if missing else []


async def _operator(cluster: Cluster, namespace: str, selector: str, port: int) -> list[str]:
    pods = await cluster.list("Pod", namespace, selector)
    addresses = [
        pod["status"]["podIP"]
        for pod in pods
        if pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]
    ]
    if not addresses:
        return [f"no pod of the operator runs in {namespace}: kubectl -n {namespace} describe pod -l {selector}"]
    return [complaint for address in addresses if (complaint := await _ask(address, port))]


async def _ask(address: str, port: int) -> str | None:
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}/healthz"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session, session.get(url) as answer:
            said = (await answer.text()).strip()
            return None if answer.status == 200 else f"the operator answers {answer.status} on {url}: {said}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"the operator does not answer on {url}: {type(error).__name__} {error}"
