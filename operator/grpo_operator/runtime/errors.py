"""Errors of the API server that callers distinguish."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass

import aiohttp
from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.decide.absent import exceeds_quota
from grpo_spec.reasons import Reason


class ConflictError(Exception):
    """The object changed since it was read: plan again from a live read."""


class ObstacleError(Exception):
    """Something in the cluster stands in the way of a child; the text names the child and says what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RefusedError(ObstacleError):
    """The API server refuses a child as it is."""


class ForeignError(ObstacleError):
    """An object of the child's name exists and is not the job's: it is not adopted."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.NAME_TAKEN, message)


class LeftoverError(ForeignError):
    """The object belongs to an earlier job of the same name. `uid`: the object's, empty if it is being deleted."""

    def __init__(self, message: str, uid: str) -> None:
        super().__init__(message)
        self.uid = uid


class ForbiddenError(ObstacleError):
    """The operator's roles do not allow the request."""

    def __init__(self, verb: str, kind: str, path: str, said: str) -> None:
        what = f"the operator's ServiceAccount may not {verb} {kind} ({path})"
        super().__init__(Reason.OPERATOR_FORBIDDEN, f"{what}; grant it the chart's roles: {said}")
        self.verb, self.kind, self.said = verb, kind, said


class EarlyError(ObstacleError):
    """The API server has not noticed the CRD of a child's owner yet, which takes up to half a minute.

    With OwnerReferencesPermissionEnforcement it refuses children until then.
    """

    def __init__(self) -> None:
        super().__init__(
            Reason.CLUSTER_NOT_READY,
            f"the API server does not know {names.KIND}s as owners of other objects yet, which takes it up to half a "
            "minute after their CRD is installed; there is nothing to do",
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """An error that needs no traceback: its subject, equal for all errors of one cause, and one line about it."""

    subject: Hashable
    text: str


def expected(error: Exception) -> Expected | None:
    """Return what an expected error says; None if it is a fault of this program, or an answer that nobody foresaw."""
    if isinstance(error, ForbiddenError):
        return Expected((error.verb, error.kind), str(error))
    if isinstance(error, ObstacleError):
        return Expected((error.reason, str(error)), str(error))
    if isinstance(error, OSError | TimeoutError | aiohttp.ClientError):
        said = f"{type(error).__name__} {error}".strip()
        return Expected("unreachable", f"the API server cannot be reached, or does not answer: {said}")
    status = _status(error)
    if status is None:
        return None
    said = reason_of(error) if isinstance(error, ApiException) else str(error.args[0] if error.args else error)
    if status == 404:
        crds = f"if it is about {names.PLURAL}.{names.GROUP}: kubectl apply --server-side -f crds/"
        return Expected(status, f"the API server does not serve what it was asked for: {said}; {crds}")
    if status in (401, 403):
        return Expected((status, said), f"the API server refuses the operator: {said}; grant it the chart's roles")
    if status == 429 or status >= 500:
        return Expected(status, f"the API server is busy or not ready ({status}): {said}")
    return None


def _status(error: Exception) -> int | None:
    """Return the status of an answer of the API server, if the error is one; kopf does not export the class of its."""
    is_answer = isinstance(error, ApiException) or type(error).__module__.startswith("kopf.")
    status = getattr(error, "status", None)
    return status if is_answer and isinstance(status, int) else None


def reason_of(error: ApiException) -> str:
    """Return the API server's message from an error's body, else the status line."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
    return str(message)


def is_forbidden(error: ApiException) -> bool:
    """Whether the operator lacks a right. Other 403s come from quotas, admission plugins and webhooks, or are early."""
    lacks = re.search(r'User "[^"]*" cannot |cannot set blockOwnerDeletion', reason_of(error))
    return error.status == 403 and lacks is not None


def refusal(error: ApiException, kind: str, name: str) -> RefusedError | None:
    """Return what an error says about the child kind/name if repeating the request cannot help, else None."""
    said, child = reason_of(error), f"{kind} {name}"
    # Server-side apply answers 500 for unknown fields, values of another type and items without a name.
    is_malformed = error.status == 500 and "failed to create typed patch object" in said
    if not (is_malformed or error.status in (400, 403, 422)):
        return None
    if error.status == 403 and exceeds_quota(said):
        return RefusedError(
            Reason.QUOTA_EXCEEDED,
            f"{child} does not fit the namespace's quota; raise it, or delete what uses it: {said}",
        )
    if error.status == 403 or kind != "StatefulSet" or "admission webhook" in said:
        return RefusedError(Reason.CHILD_REFUSED, f"the cluster does not admit {child}: {said}")
    return RefusedError(
        Reason.INVALID_POD_TEMPLATE, f"the API server refuses {child}, which spec.podTemplate shapes: {said}"
    )


def is_temporary(error: Exception) -> bool:
    """Whether the cause passes by itself: another writer was faster, or the API server is away or busy."""
    if isinstance(error, ApiException):
        return error.status is None or error.status == 429 or error.status >= 500
    return isinstance(error, ConflictError | OSError | TimeoutError | aiohttp.ClientError)


def is_early(error: ApiException) -> bool:
    """Whether the answer is an EarlyError."""
    return "cannot find RESTMapping" in reason_of(error)
