"""Which nodes new pods avoid: lost ones, and those on which attempts failed again. Pure.

A preference, no rule: no other node may fit.
"""

from __future__ import annotations

from grpo_operator.api.placement_status import AvoidedNode, FailedNode
from grpo_operator.api.status import Failure
from grpo_operator.decide.blame import EFFECTS
from grpo_operator.decide.conditions import Draft
from grpo_operator.decide.lifecycle import after
from grpo_spec.reasons import Reason

AVOID_SECONDS = 1800
"""Seconds during which new pods avoid a node."""

ATTEMPTS = 2
"""Number of attempts that have to fail on a node before it is avoided: one may fail anywhere. One more if pods are kept:
the second attempt could begin nowhere else."""

_MOST = 64

_NOT_OF_NODES = frozenset({Reason.EVICTED, Reason.POD_REPLACED, Reason.WEIGHTS_DIFFER, Reason.REPEATED_FAILURE})
"""Failures that say nothing about the node, although they count."""


def note_failure(draft: Draft, failure: Failure, *, keeps_pods: bool = False) -> str:
    """Note where an attempt or an engine failed. Return the words that say which node is avoided now, or nothing.

    `keeps_pods`: the next attempt is to begin in the same pods, unless their node is avoided.
    """
    if failure.node is None:
        return ""
    if failure.reason == Reason.NODE_LOST:
        return _avoid(draft, failure.node, "")
    if not failure.counted or failure.exit_code in EFFECTS or failure.reason in _NOT_OF_NODES:
        return ""
    nodes = {node.name: node for node in draft.status.failed_nodes}
    old = nodes.pop(failure.node, None)
    attempts = (old.attempts if old else 0) + (old is None or old.last != failure.attempt)
    new = FailedNode(name=failure.node, attempts=attempts, last=failure.attempt)
    draft.update(failed_nodes=(*nodes.values(), new)[-_MOST:])
    return (
        ""
        if attempts < ATTEMPTS + keeps_pods
        else _avoid(draft, failure.node, f", where {attempts} attempts have failed")
    )


def _avoid(draft: Draft, name: str, why: str) -> str:
    others = [node for node in draft.status.avoid_nodes if node.name != name]
    until = after(draft.now, AVOID_SECONDS)
    draft.update(avoid_nodes=(*others, AvoidedNode(name=name, until=until))[-_MOST:])
    return f", on other nodes than {name} if possible{why}"
