"""One line at level DEBUG after each pass: what it saw, what it decided, and when the next one is due."""

from __future__ import annotations

import logging

from grpo_operator.decide.plan import Obstacle, Plan
from grpo_operator.passes.children import Changes
from grpo_operator.passes.snapshot import Snapshot
from grpo_operator.runtime.kept import Key

log = logging.getLogger(__name__)


def log_pass(
    key: Key,
    seen: Snapshot,
    obstacle: Obstacle | None,
    decided: Plan,
    changes: Changes | None,
    *,
    written: bool,
    delay: float | None,
) -> None:
    """Log a pass. `changes` None: it left the children for the next one; `delay`: seconds until that is due."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "pass job=%s/%s phase=%s attempt=%s ready=%d/%d obstacle=%s mode=%s applies=%d stops=%d deletions=%d "
        "written=%s next=%s",
        key.namespace,
        key.name,
        seen.status.phase,
        "none" if seen.status.attempt is None else seen.status.attempt,
        sum(pod.ready for pod in seen.observed.pods.values()),
        len(seen.topology.pods),
        "none" if obstacle is None else obstacle.reason,
        decided.mode,
        len(changes.applies) if changes else 0,
        len(changes.stops) if changes else 0,
        len(changes.removals) + len(decided.deletions) + decided.delete_job if changes else 0,
        str(written).lower(),
        "none" if delay is None else f"{delay:.1f}",
    )


def log_conflict(key: Key, error: Exception) -> None:
    """Log a pass that ended because what it had read was out of date."""
    log.debug("pass job=%s/%s conflict=%r", key.namespace, key.name, str(error))


def log_quiet(key: Key, delay: float) -> None:
    """Log a look at a job that is as quiet as before."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("pass job=%s/%s quiet next=%.1f", key.namespace, key.name, delay)
