"""Sends the documents of a manifest to a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubernetes.client.exceptions import ApiException

from grpo_cli.cluster.api_errors import explain
from grpo_cli.cluster.kube import Kube
from grpo_cli.documents.manifest import Document, JobDocument, nth
from grpo_cli.errors import CliError, Exit


def submit(
    kube: Kube, documents: Sequence[Document | JobDocument], source: str, *, force: bool
) -> Iterator[tuple[str, bool]]:
    """Apply documents in their order on the server; yield of each what it is and where, and whether it is new.

    They go to the namespace of `kube`, unless they name another one. Raises CliError before the first request if a
    document contradicts --namespace, and for the first that the server refuses: those before it stay.
    """
    for document in map(_plain, documents):
        own = document["metadata"].get("namespace")
        if kube.is_asked_for and own not in (None, kube.namespace):
            raise CliError(
                f"{source} says namespace {own}, and --namespace {kube.namespace}: leave one out", Exit.INVALID
            )
    for number, one in enumerate(documents, 1):
        document = _plain(one)
        name, own = document["metadata"]["name"], document["metadata"].get("namespace") or kube.namespace
        kind = "job" if isinstance(one, JobDocument) else document["kind"]
        try:
            is_new = kube.apply(document, force=force)
        except (ApiException, CliError) as error:
            explained = error if isinstance(error, CliError) else explain(error)
            raise CliError(
                f"{source}: {nth(number, documents)}{kind} {name}: {explained.message}", Exit(explained.exit_code)
            ) from error
        yield f"{kind} {own}/{name}", is_new


def _plain(one: Document | JobDocument) -> Document:
    return one.document if isinstance(one, JobDocument) else one
