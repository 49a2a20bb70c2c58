"""Settings of a site, on a real API server: they reach new jobs and no others, hold where they are enforced, and
each object says whether it is valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.progress import wait_until
from grpo_operator.api.names import API_VERSION, DEFAULTS_KINDS, DEFAULTS_NAME
from support.control_plane.operators import Jobs, make_job

CLUSTER, NAMESPACE = DEFAULTS_KINDS
TOLERATION = {"key": "gpus", "operator": "Exists"}


def _set(jobs: Jobs, kind: str, name: str = DEFAULTS_NAME, **spec: Any) -> None:
    jobs.apply({"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec})


def _wait_until_judged(jobs: Jobs, kind: str) -> str:
    """Wait until the operator has judged an object as it is now, and return what it says."""

    def judged() -> bool:
        found = jobs.get(kind, DEFAULTS_NAME)
        conditions = found.get("status", {}).get("conditions", [])
        return [one["observedGeneration"] for one in conditions] == [found["metadata"]["generation"]]

    wait_until(judged, f"{kind} is judged", 60, interval=0.2)
    (condition,) = jobs.get(kind, DEFAULTS_NAME)["status"]["conditions"]
    return f"{condition['status']}: {condition['message']}"


@pytest.fixture
def site(jobs: Jobs) -> Iterator[Jobs]:
    """A site that sets labels and a toleration for all jobs, and a label for those of the test's namespace."""
    far: dict[str, Any] = {"commonLabels": {"site": "far", "zone": "z"}, "podTemplate": {"tolerations": [TOLERATION]}}
    _set(jobs, CLUSTER, defaults=far, enforced={"commonAnnotations": {"cost": "team"}})
    _set(jobs, NAMESPACE, defaults={"commonLabels": {"site": "near"}})
    yield jobs
    jobs("delete", CLUSTER, DEFAULTS_NAME)


def test_a_job_has_what_its_site_sets_and_keeps_it_in_later_attempts(site: Jobs) -> None:
    for kind in DEFAULTS_KINDS:
        assert _wait_until_judged(site, kind) == "True: jobs that begin from now on have these values"
    site.run("old", failurePolicy={"backoffSeconds": 0})

    def shown(name: str) -> tuple[str, ...]:
        pod = site.get("pod", name)
        assert TOLERATION in pod["spec"]["tolerations"]
        labels = pod["metadata"]["labels"]
        return labels["site"], labels["zone"], pod["metadata"]["annotations"]["cost"]

    assert shown("old-a-0") == ("near", "z", "team")
    _set(site, NAMESPACE, defaults={"commonLabels": {"site": "later"}})
    site.run("new")
    assert shown("new-a-0") == ("later", "z", "team")
    site.fail("old-b-0")
    site.wait_for_attempt("old", 1)
    assert shown("old-b-0") == ("near", "z", "team")
    kept = {kind: one["defaults"]["commonLabels"]["site"] for kind, one in site.status("old")["site"].items()}
    assert kept == {CLUSTER: "far", NAMESPACE: "near"}


def test_render_and_status_say_where_values_are_from(site: Jobs, grpo: Any, tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(make_job("shown", commonLabels={"zone": "mine"})))
    rendered = grpo("render", str(manifest), "--cluster")
    for one in (
        f"# what the site sets for jobs of {site.namespace}",
        f"#   spec.commonLabels.site: near  ({NAMESPACE} default)",
        f"#   spec.commonAnnotations.cost: team  ({CLUSTER} default, enforced)",
    ):
        assert one in rendered.output
    assert "commonLabels.zone" not in rendered.output
    children = [one for one in yaml.safe_load_all(rendered.output) if one["kind"] == "StatefulSet"]
    assert all(one["metadata"]["labels"].items() >= {"site": "near", "zone": "mine"}.items() for one in children)
    manifest.write_text(json.dumps(make_job("shown", commonAnnotations={"cost": "mine"})))
    refused = grpo("render", str(manifest), "--cluster")
    assert (refused.exit_code, "enforces team" in refused.stderr) == (2, True)

    site.run("shown", commonLabels={"zone": "mine"})
    said = grpo("status", "shown").output
    cluster = "commonAnnotations.cost, podTemplate.tolerations from GRPOClusterDefaults"
    assert f"{cluster}; commonLabels.site from GRPODefaults" in " ".join(said.split())


def test_a_job_that_sets_otherwise_what_is_enforced_waits_and_says_why(site: Jobs) -> None:
    site.apply(make_job("other", commonAnnotations={"cost": "mine"}))
    said = site.wait_for("other", "Accepted", "False", "RefusedBySite")["message"]
    assert f"spec.commonAnnotations.cost: {CLUSTER} default enforces team; set this, or leave it out" in said
    assert site.status("other")["phase"] == "Invalid"
    site.edit("other", commonAnnotations={"cost": None})
    site.wait_for("other", "Running", "True")
    assert site.get("pod", "other-a-0")["metadata"]["annotations"]["cost"] == "team"


def test_a_wrong_object_is_refused_or_says_what_becomes_of_jobs(site: Jobs) -> None:
    for wrong, said in (
        ({"defaults": {"training": {"maxSteps": 3}}}, 'unknown field "spec.defaults.training"'),
        ({"defaults": {"gpuHourPrice": "much"}}, "spec.defaults.gpuHourPrice in body should match"),
        ({"enforced": {"device": {"type": "tpu"}}}, "spec.enforced.device.type: Unsupported value"),
        ({"defaults": {"podTemplate": {"env": [{"name": "RANK"}]}}}, "the launcher set this variable"),
    ):
        with pytest.raises(RuntimeError, match=said):
            _set(site, NAMESPACE, **wrong)
    with pytest.raises(RuntimeError, match="the name must be default: one GRPODefaults counts"):
        _set(site, NAMESPACE, name="second")
    _set(site, NAMESPACE, defaults={"network": {"rdmaCount": 3}})
    refused = f"with {NAMESPACE} default: spec.network: rdmaCount needs rdmaResource, of which it is the number"
    assert _wait_until_judged(site, NAMESPACE) == f"True: jobs that set no more than they must are refused: {refused}"
    site.apply(make_job("plain"))
    said = site.wait_for("plain", "Accepted", "False", "RefusedBySite")["message"]
    assert "rdmaCount needs rdmaResource" in said
    _set(site, NAMESPACE, defaults={"commonLabels": {"site": "near"}})
    site.wait_for("plain", "Running", "True")  # without an edit
