"""Failures of requests to the API server as errors for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import urllib3
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from grpo_cli.errors import CliError, Exit


@contextmanager
def explained() -> Iterator[None]:
    """Turn failures to talk to a cluster into a CliError."""
    try:
        yield
    except (ApiException, ConfigException, urllib3.exceptions.HTTPError) as error:
        raise explain(error) from error


def explain(error: Exception) -> CliError:
    """Return what a failed request means for the person who made it."""
    if isinstance(error, ConfigException):
        return CliError(
            f"no usable kubeconfig: {error}; use --kubeconfig or --context, or set KUBECONFIG", Exit.UNREACHABLE
        )
    if not isinstance(error, ApiException) or not error.status:
        return CliError(
            f"the API server does not answer: {_root_cause(error)}; is the cluster up, and is --context right?",
            Exit.UNREACHABLE,
        )
    said = said_by(error)
    if error.status == 401:
        return CliError(
            f"the API server does not accept these credentials ({said}); log in to the cluster again", Exit.UNREACHABLE
        )
    if error.status == 403 and "cannot" in said and "denied the request" not in said:
        return CliError(
            f"not allowed: {said}; ask for a role that allows it, or use another --namespace", Exit.UNREACHABLE
        )
    if error.status == 404:
        return CliError(f"not found: {said}", Exit.NOT_FOUND)
    if error.status == 409 and "conflict" in said:
        return CliError(
            f"fields of the manifest belong to others: {said}; use --force-conflicts to take them over", Exit.INVALID
        )
    # A field of another type, or an unknown one of a built-in kind, is answered 500 by server-side apply.
    if error.status in (400, 403, 409, 422) or said.startswith("failed to create typed patch object"):
        return CliError(f"the API server refuses the request: {said}", Exit.INVALID)
    return CliError(f"the API server answers {error.status}: {said}; try again", Exit.UNREACHABLE)


def said_by(error: Exception) -> str:
    """Return the API server's message, or the text of another error."""
    if not isinstance(error, ApiException):
        return str(error)
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _root_cause(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return _root_cause(reason)
    return str(reason or error).rpartition(": ")[2] if "object at 0x" in str(error) else str(reason or error)
