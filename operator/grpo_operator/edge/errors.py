"""Errors of the API server that callers distinguish."""

from __future__ import annotations

import json

from kubernetes.aio.client.exceptions import ApiException


class ConflictError(Exception):
    """The object changed since it was read: plan again from a live read."""


class RefusedError(Exception):
    """The API server refuses the object as it is (400, 403, 422); the text is the API server's."""


class ForeignError(Exception):
    """An object of that name exists and is not the job's: it is not adopted."""


class ForbiddenError(Exception):
    """The operator's roles do not allow the request."""


def reason_of(error: ApiException) -> str:
    """Return the API server's message from an error's body, else the status line."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
    return str(message)


def is_refusal(error: ApiException) -> bool:
    """Whether the API server refuses the object permanently.

    With OwnerReferencesPermissionEnforcement it also refuses children until it has noticed a new CRD of their owner,
    for up to half a minute: that is temporary.
    """
    return error.status in (400, 403, 422) and "cannot find RESTMapping" not in reason_of(error)
