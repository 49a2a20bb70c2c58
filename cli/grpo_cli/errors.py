"""Errors as a person meets them: one line that says what is wrong and what to do, and an exit code that says which kind it is."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import click
import urllib3
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from grpo_cli.view import StatusError
from grpo_operator import names

NEAR_NAMES = 3


class Exit(IntEnum):
    """Exit codes of all commands that talk to a cluster."""

    OK = 0
    FAILED = 1
    INVALID = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    DEADLINE = 124
    INTERRUPTED = 130


EXIT_CODES = """\b
Exit codes:
  0    done; with --wait and watch: the job is Complete
  1    the job is Failed (--wait and watch)
  2    the command line or the manifest is wrong, or the API server refuses it
  3    the cluster does not answer, or does not allow it
  4    there is no such job, or nothing of it is left to show
  124  --timeout is over; the job goes on
  130  interrupted; the job goes on"""
"""For the --help of commands."""


class CliError(click.ClickException):
    """What is wrong, and the exit code for it."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = code  # type: ignore[misc]  # click declares it of the class; each error has its own


class TellingGroup(click.Group):
    """Commands whose failures to talk to a cluster are told in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ApiException, ConfigException, urllib3.exceptions.HTTPError, StatusError) as error:
            raise explain(error) from error
        except KeyboardInterrupt:
            ctx.exit(Exit.INTERRUPTED)


def explain(error: Exception) -> CliError:
    """What a failed request means for the person who made it."""
    if isinstance(error, ConfigException):
        return CliError(f"no usable kubeconfig: {error}; give --kubeconfig or --context, or set KUBECONFIG", Exit.UNREACHABLE)
    if isinstance(error, StatusError):
        return CliError(str(error), Exit.INVALID)
    if not isinstance(error, ApiException) or not error.status:
        return CliError(
            f"the API server does not answer: {_root_cause(error)}; is the cluster up, and --context the right one?", Exit.UNREACHABLE
        )
    said = said_by(error)
    if error.status == 401:
        return CliError(f"the API server does not accept these credentials ({said}); log in to the cluster anew", Exit.UNREACHABLE)
    if error.status == 403 and "forbidden" in said and "denied the request" not in said:
        return CliError(f"not allowed: {said}; ask for a role that allows it, or try another --namespace", Exit.UNREACHABLE)
    if error.status == 404:
        return CliError(f"not found: {said}", Exit.NOT_FOUND)
    if error.status == 409 and "conflict" in said:
        return CliError(f"others have set fields of the manifest: {said}; take them over with --force-conflicts", Exit.INVALID)
    if error.status in (400, 403, 409, 422):
        return CliError(f"the API server refuses it: {said}", Exit.INVALID)
    return CliError(f"the API server answers {error.status}: {said}; try again", Exit.UNREACHABLE)


def said_by(error: ApiException) -> str:
    """The API server's own words."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def no_crd() -> CliError:
    """The API server does not know GRPOJobs."""
    return CliError(
        f"this cluster has no {names.PLURAL}.{names.GROUP}: install the operator (helm install grpo-operator charts/grpo-operator), "
        "or choose another --context",
        Exit.NOT_FOUND,
    )


def no_job(name: str, namespace: str, there: Iterable[str], elsewhere: Callable[[], Iterable[str]]) -> CliError:
    """No job of that name; names the nearest ones, and namespaces that have it."""
    there = sorted(there)
    near = difflib.get_close_matches(name, there, n=NEAR_NAMES, cutoff=0.5)
    spaces = sorted(elsewhere())
    if spaces:
        fix = f"there is one in {', '.join(spaces[:NEAR_NAMES])}: give --namespace"
    elif near:
        fix = f"did you mean {' or '.join(near)}?"
    elif there:
        fix = (
            f"there {'is' if len(there) == 1 else 'are'} {', '.join(there[:NEAR_NAMES])}{' and others' if len(there) > NEAR_NAMES else ''}"
        )
    else:
        fix = "there is no job in this namespace: see `grpo list --all-namespaces`"
    return CliError(f"no job {name} in namespace {namespace}; {fix}", Exit.NOT_FOUND)


def _root_cause(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return _root_cause(reason)
    return str(reason or error).rpartition(": ")[2] if "object at 0x" in str(error) else str(reason or error)
