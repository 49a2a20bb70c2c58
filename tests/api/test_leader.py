"""The operator that acts is killed, and another one paused: the next goes on within 25 s, and nothing is done twice.

test_election.py has the elections themselves.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane import audit
from support.control_plane.operators import Jobs, Operator, install_chart, kubeconfig_of

NAME = "pair"
Make = Callable[[str], Operator]


@pytest.fixture
def make(control_plane: ControlPlane, kubectl: Any, namespace: str, operator: Operator) -> Iterator[Make]:
    """`make(pod)` returns an operator of one release, with its own token; it ends with the test."""
    values = (f"watchNamespaces={{{namespace}}}", "crds.install=false")
    release = install_chart(control_plane, kubectl, *values, name=NAME, namespace=namespace)
    made: list[Operator] = []

    def make(pod: str) -> Operator:
        kubeconfig = kubeconfig_of(control_plane, kubectl, namespace, NAME, f".{pod}")
        log = control_plane.state / "logs" / f"{namespace}.{pod}.log"
        made.append(Operator(kubeconfig, log, release.arguments, pod=pod))
        return made[-1]

    with operator.down():
        yield make
        for each in made:
            each.kill()


def _stands_by(one: Operator) -> None:
    one.start()
    wait_until(lambda: one.get("/readyz")[0] == 200, "it stands by", 60, interval=0.1)
    assert one.get("/healthz") == (200, "ok\n")


def _action(event: dict[str, Any]) -> tuple[str, str]:
    """Return what a write did to which object, as far as a restart does it."""
    about, name = event["objectRef"], event["objectRef"].get("name", "")
    if event["verb"] == "delete":
        return "delete", name
    if about["resource"] != "statefulsets" or "dryRun=All" in event["requestURI"]:
        return "other", name
    if event["verb"] == "create":
        return "create", name
    if "fieldManager" not in event["requestURI"]:
        return "note as applied", name
    return "apply" if "force=true" in event["requestURI"] else "scale", name


def test_another_operator_takes_over_and_nothing_is_done_twice(
    make: Make, control_plane: ControlPlane, kubectl: Any, namespace: str
) -> None:
    jobs, operators = Jobs(kubectl, namespace), [make(pod) for pod in ("first", "second", "third")]
    first, second, third = operators
    first.start()
    jobs.run("job", failurePolicy={"backoffSeconds": 1})
    _stands_by(second)

    first.kill()
    jobs.fail("job-b-0")
    jobs.wait_for("job", "Restarting", "True", timeout=25)
    jobs.wait_for_attempt("job", 1)

    _stands_by(third)
    jobs.fail("job-b-0")
    jobs.wait_for("job", "Restarting", "True")
    second.signal(signal.SIGSTOP)  # in the back-off of 2 s: when it goes on, its pass is overdue
    jobs.wait_for_attempt("job", 2)
    second.signal(signal.SIGCONT)
    wait_until(lambda: second.has_ended, "the end of the operator that was paused", 25)
    assert "second does not lead any more: the Lease pair: it was not renewed for 10 s" in second.log.read_text()

    assert jobs.status("job")["restarts"] == {"total": 2, "counted": 2}
    assert jobs.get("lease", NAME)["spec"]["holderIdentity"] == "third"
    user = f"system:serviceaccount:{namespace}:{NAME}"
    done = [audit.writes(control_plane.audit_log, user, each.kubeconfig) for each in operators]
    at_work = [[event for event in writes if event["objectRef"]["resource"] != "leases"] for writes in done]
    times = [sorted(event["requestReceivedTimestamp"] for event in writes) for writes in at_work]
    assert times[0][-1] < times[1][0], "the second operator wrote before the first was killed"
    assert times[1][-1] < times[2][0], "two operators wrote at one time"
    counted = Counter(_action(event) for writes in at_work for event in writes)
    of_a_group = {"create": 1, "scale": 2, "note as applied": 1, "apply": 2}
    groups = {(action, name): times for action, times in of_a_group.items() for name in ("job-a", "job-b")}
    deletions = {("delete", "job-0"): 1, ("delete", "job-1"): 1}
    assert {action: counted[action] for action in counted if action[0] != "other"} == groups | deletions
    assert audit.denials(control_plane.audit_log, user) == []

    third.signal(signal.SIGTERM)
    wait_until(lambda: third.has_ended, "the orderly end", 60)
    assert not jobs.get("lease", NAME)["spec"].get("holderIdentity"), "the Lease was not given back"
