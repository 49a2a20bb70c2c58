"""Errors for people: one line that says what is wrong and what to do, and an exit code for its kind."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from enum import IntEnum

import click

from grpo_operator.api import names

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
  1    the job is Failed (--wait and watch); a file could not be copied
  2    the command line or the manifest is wrong, or the API server refuses it
  3    the cluster does not answer, or does not allow it
  4    the job, claim or file does not exist, or there is nothing left of the job to show
  124  --timeout has passed, and the job continues; the pod of a copy did not start
  130  interrupted; the job continues"""
"""The end of the --help of commands that talk to a cluster."""


class CliError(click.ClickException):
    """An error of one line, and its exit code."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = code  # type: ignore[misc]  # click declares it for the class; here each error has one


def no_crd() -> CliError:
    """Return the error for a cluster without GRPOJobs."""
    return CliError(
        f"this cluster has no {names.PLURAL}.{names.GROUP}: install the operator "
        "(helm install grpo-operator charts/grpo-operator), or choose another --context",
        Exit.NOT_FOUND,
    )


def no_job(name: str, namespace: str, there: Iterable[str], elsewhere: Callable[[], Iterable[str]]) -> CliError:
    """Return the error for an unknown job; it names similar jobs, or other namespaces that have the job."""
    there = sorted(there)
    near = difflib.get_close_matches(name, there, n=NEAR_NAMES, cutoff=0.5)
    spaces = sorted(elsewhere())
    if spaces:
        fix = f"there is one in {', '.join(spaces[:NEAR_NAMES])}: use --namespace"
    elif near:
        fix = f"did you mean {' or '.join(near)}?"
    elif there:
        others = " and others" if len(there) > NEAR_NAMES else ""
        fix = f"there {'is' if len(there) == 1 else 'are'} {', '.join(there[:NEAR_NAMES])}{others}"
    else:
        fix = "this namespace has no jobs: see `grpo list --all-namespaces`"
    return CliError(f"no job {name} in namespace {namespace}; {fix}", Exit.NOT_FOUND)
