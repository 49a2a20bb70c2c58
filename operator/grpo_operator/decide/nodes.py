"""Nodes that new pods avoid: lost ones, and those on which attempts failed again. Pure.

A preference, no rule: no other node may fit.
"""

from __future__ import annotations

from grpo_operator.api.placement_status import AvoidedNode, FailedNode
from grpo_operator.api.status import Failure
from grpo_operator.api.times import after
from grpo_operator.decide.blame import EFFECTS
from grpo_operator.decide.conditions import Draft
from grpo_spec.reasons import Reason

AVOID_SECONDS = 1800
"""Seconds during which new pods avoid a node."""

FAILURES = 2
"""Number of failures on a node after which it is avoided: one may happen anywhere. If pods are kept, it is one more,
because the second attempt could begin nowhere else."""

_MOST = 64

_NOT_OF_NODES = frozenset(
    {Reason.EVICTED, Reason.PREEMPTED, Reason.STOPPED, Reason.POD_REPLACED}
    | {Reason.WEIGHTS_DIFFER, Reason.REPEATED_FAILURE, Reason.HUNG, Reason.ENVIRONMENT_FAILED}
)
"""Failures that say nothing about the node, although they count. A hang is reported by rank 0, wherever it began; lost
episodes are counted over all ranks."""


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
    known = {node.name: node.failures for node in draft.status.failed_nodes}
    failures = known.pop(failure.node, 0) + 1
    known[failure.node] = failures  # the newest comes last
    noted = tuple(FailedNode(name=name, failures=number) for name, number in known.items())
    draft.update(failed_nodes=noted[-_MOST:])
    if failures < FAILURES + keeps_pods:
        return ""
    return _avoid(draft, failure.node, f", where pods have failed {failures} times")


def _avoid(draft: Draft, name: str, why: str) -> str:
    others = [node for node in draft.status.avoid_nodes if node.name != name]
    until = after(draft.now, AVOID_SECONDS)
    draft.update(avoid_nodes=(*others, AvoidedNode(name=name, until=until))[-_MOST:])
    return f", on other nodes than {name} if possible{why}"
