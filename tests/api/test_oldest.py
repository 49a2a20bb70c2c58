"""A feature that needs a newer Kubernetes is refused by name, and the job runs without it. The server is old."""

import json
from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, make_job

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize(
    ("asks", "without", "missing"),
    [
        (
            {"scheduling": {"gang": "Native"}},
            {"scheduling": {"gang": None}},
            "spec.scheduling.gang Native: when the operator started, the API server did not serve PodGroups "
            "(scheduling.k8s.io/v1beta1 or scheduling.k8s.io/v1alpha2); switch gang scheduling on",
        ),
        (
            {"trainer": {"groups": [{"name": "a", "gpus": 1, "resourceClaimTemplateName": "gpus"}]}},
            {"trainer": {"groups": [{"name": "a", "gpus": 1}]}},
            "resourceClaimTemplateName: the API server does not serve resource.k8s.io/v1, which Kubernetes has from "
            "1.34 on; leave it out",
        ),
    ],
    ids=["gang", "devices by claim"],
)
def test_what_the_server_lacks_is_named_and_the_job_runs_without_it(
    jobs: Jobs, asks: dict[str, Any], without: dict[str, Any], missing: str
) -> None:
    jobs.apply(make_job("asks", **asks))
    message = jobs.wait_for("asks", "Accepted", "False", "InvalidSpec")["message"]
    assert missing in message
    assert jobs.list("statefulsets") == []
    jobs("patch", "grpo", "asks", "--type=merge", "-p", json.dumps({"spec": without}))
    jobs.wait_for("asks", "Running", "True")


def test_a_pod_template_that_the_server_accepts_in_a_statefulset_but_not_in_a_pod_is_waited_for(jobs: Jobs) -> None:
    """Kubernetes before 1.34 does not validate a StatefulSet's template: its controller is refused every pod."""
    bad = {"volumeMounts": [{"name": "nothing", "mountPath": "/x"}]}
    jobs.apply(make_job("template", podTemplate=bad))
    message = jobs.wait_for("template", "Scheduled", "False", "WaitingForPods")["message"]
    assert "template-a-0 is missing (kubectl describe statefulset template-a says why)" in message
    wait_until(lambda: 'Not found: "nothing"' in jobs("describe", "statefulset", "template-a"), "the reason", 60)
    jobs.apply(make_job("template", suspend=True, podTemplate=bad))
    jobs.wait_for("template", "Suspended", "True")
    jobs.apply(make_job("template", suspend=True))
    jobs.run("template")
