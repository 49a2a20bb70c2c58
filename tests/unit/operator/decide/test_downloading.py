"""With cache.prefetch, a Job without GPUs downloads before the first attempt, and says how far it is."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide.attempts import is_about_to_begin
from grpo_operator.decide.conditions import holds
from grpo_operator.decide.deletions import Deletion
from grpo_operator.decide.observe import Child, nodes_to_check, read_child
from grpo_operator.decide.observed_pod import Ending, ObservedPod, read_pod
from grpo_operator.decide.plan import Mode, Obstacle, Plan, plan
from grpo_operator.layout.downloads import download_job
from grpo_operator.layout.job import Queue
from grpo_operator.layout.topology import plan_topology
from grpo_spec.contract import Downloads
from grpo_spec.gpus import gpu_bytes
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress
from support.control_plane.jobs import NOW, ended, job, observed, pod, pod_as_read
from support.control_plane.passes import Case

CACHE = {"cache": {"claimName": "models", "prefetch": True}}


class Fetching(Case):
    """A job whose model is downloaded first."""

    def __init__(self, **spec: Any) -> None:
        self.edit(**(CACHE | spec))
        self.status = GRPOJobStatus()
        self.child: Child | None = None
        self.downloader: ObservedPod | None = None
        self.why_absent: tuple[Reason, str] | None = None

    def fails(self, code: int = 1, uid: str = "j", reason: str = "Error") -> None:
        """Let the try end with this exit code."""
        self.made("Failed", uid=uid)
        ending = Ending(ended(code, reason))
        self.downloader = pod("job-download-x", role="download", controller=uid, endings=(ending,))

    def made(self, *states: str, uid: str = "j") -> None:
        """Let the Job exist, in these conditions."""
        raw = download_job(self.job, self.topology)
        raw["metadata"] |= {"uid": uid, "resourceVersion": "1"}
        raw["status"] = {"conditions": [{"type": kind, "status": "True", "message": "too often"} for kind in states]}
        self.child = read_child("Job", raw)

    def look(self, at: int = 0, obstacle: Obstacle | None = None, said: str = "") -> Plan:
        """Plan one pass."""
        there, pods = (self.child,) if self.child else (), (self.downloader,) if self.downloader else ()
        seen = observed(children=there, downloaders=pods, has_queues=True, why_absent=self.why_absent)
        reports = {one.name: Progress(phase=said) for one in pods} if said else {}
        self.last = plan(self.job, self.topology, self.status, seen, reports, after(NOW, at), obstacle)
        self.status = self.last.status
        return self.last


def test_nothing_of_the_job_asks_for_gpus_until_the_model_is_there() -> None:
    case = Fetching()
    assert not is_about_to_begin(case.job, case.status, observed(), NOW), "nor is it checked whether it could begin"
    first = case.look()
    assert (first.download.create, first.mode, first.status.attempt) == (True, Mode.KEEP, None)
    assert first.download, "the pass has something to do"
    case.made()
    case.downloader = pod("job-download-x", role="download", controller="j")
    waits = case.look(at=5, said="downloads tiny: 1.50 of 9.00 GB")
    assert (waits.status.phase, waits.status.summary.reason, waits.download.create) == ("Pending", "Downloading", False)
    said = "no GPU is asked for yet; pod job-download-x: downloads tiny: 1.50 of 9.00 GB"
    assert waits.status.summary.message == said
    case.made("Complete")
    begun = case.look(at=60)
    assert (begun.status.attempt, begun.mode, begun.download.removals) == (0, Mode.RUN, (case.child,))
    assert begun.status.active_since == after(NOW, 60), "the clock of deadlines begins with the first attempt"


@pytest.mark.parametrize(("code", "reason"), [(64, "Error"), (1, "ConfigError")])
def test_what_the_hub_or_the_image_does_not_have_ends_the_job_at_once_and_says_why(code: int, reason: str) -> None:
    case = Fetching()
    case.fails(code=code, reason=reason)
    case.look()
    assert (case.status.phase, case.status.summary.reason) == ("Failed", "ConfigError")
    where = f"download pod job-download-x on node node, exit code {code}"
    assert case.message(Condition.FAILED) == f"{where}: the download into the cache failed: said {reason}"
    assert not case.look(at=9).download, "its pod's log says more"


def test_a_name_that_is_none_of_an_image_ends_the_job_although_its_pod_never_fails() -> None:
    case, state = Fetching(), {"waiting": {"reason": "InvalidImageName", "message": "couldn't parse image name"}}
    case.made()
    owner = {"kind": "Job", "name": "job-download", "uid": "j", "controller": True}
    metadata = {"name": "job-download-x", "uid": "x", "ownerReferences": [owner]}
    status = {"phase": "Pending", "containerStatuses": [{"name": "grpo", "state": state}]}
    case.downloader = read_pod({"metadata": metadata, "spec": {"nodeName": "node"}, "status": status})
    case.look()
    assert (case.status.phase, case.status.summary.reason) == ("Failed", "ConfigError")
    assert case.status.summary.message == (
        "download pod job-download-x on node node: the download into the cache failed: spec.image: couldn't parse "
        "image name"
    )


def test_out_of_memory_names_the_limit_that_its_pod_really_has() -> None:
    case = Fetching()
    case.made("Failed")
    exited = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "downloads tiny"}}}
    labels = {"labels": {names.LABEL_ROLE: names.ROLE_DOWNLOAD}}
    case.downloader = replace(pod_as_read("job-download-x", exited, metadata=labels), controller="j")
    case.look()
    assert "limits.memory but at most 8Gi: raise that if it is less, else" in case.status.summary.message


def test_a_try_that_fails_waits_as_a_restart_does_counts_nothing_and_says_when_the_next_one_is() -> None:
    case = Fetching(failurePolicy={"maxRestarts": 0, "backoffSeconds": 10})
    now, waits = 0, []
    for number in range(1, 8):
        case.fails(uid=f"j{number}")
        failed = case.look(at=now)
        tries = failed.status.download
        assert tries.failures == number
        waits.append(seconds_between(after(NOW, now), tries.retry_time))
        assert not failed.download, "its pod's log can be read until then"
        assert case.message(Condition.SCHEDULED).startswith("no GPU is asked for yet; failed ")
        said = f"tried again at {rfc3339(tries.retry_time)}: download pod job-download-x on node"
        assert said in case.status.summary.message
        assert ("Warning", "DownloadFailed") in [(one.type, one.reason) for one in failed.events]
        assert case.look(at=now + 1).events == ()
        assert failed.requeue_after <= waits[-1]
        now += int(waits[-1])
        assert case.look(at=now).download.removals == (case.child,)
        case.child = None
        again = case.look(at=now)
        assert again.download.create
        assert again.status.download.retry_time is None
    assert all(0.8 * 10 * 2**i <= wait <= 1.2 * 10 * 2**i for i, wait in enumerate(waits[:6])), waits
    assert case.status.restarts.total == 0
    case.made("Complete")
    begun = case.look(at=now + 60)
    assert (begun.status.attempt, begun.status.download) == (0, None)


@pytest.mark.parametrize("why", ["fails", "hangs", "refused"])
def test_the_deadline_ends_a_job_whose_download_fails_hangs_or_is_refused_and_names_the_obstacle(why: str) -> None:
    case = Fetching(cache=CACHE["cache"] | {"prefetchDeadlineSeconds": 600})
    case.made()
    case.downloader = pod("job-download-x", role="download", controller="j")
    obstacle = "no GPU is asked for yet; pod job-download-x: downloads tiny: 1.50 of 9.00 GB"
    if why == "fails":
        case.fails()
        obstacle = "said Error"
    if why == "refused":
        case.downloader, obstacle = None, "no GPU is asked for yet; the cluster refuses the pod: no quota"
        case.why_absent = Reason.QUOTA_EXCEEDED, "the cluster refuses the pod: no quota"
    waits = case.look(said="downloads tiny: 1.50 of 9.00 GB")
    assert obstacle in waits.status.summary.message
    assert waits.status.summary.reason == {"refused": "QuotaExceeded"}.get(why, "Downloading")
    assert case.look(at=599, said="downloads tiny: 1.50 of 9.00 GB").status.phase == "Pending"
    over = case.look(at=600)
    assert (over.status.phase, over.status.summary.reason) == ("Failed", "DownloadFailed")
    message = case.message(Condition.FAILED)
    assert "not downloaded within 600 s (cache.prefetchDeadlineSeconds); " in message
    assert obstacle in message
    assert over.download.removals == (() if why == "fails" else (case.child,))


def test_a_suspended_job_downloads_nothing_and_goes_on_later_with_a_new_deadline() -> None:
    case = Fetching()
    case.made()
    assert case.look().status.download is not None
    case.job = replace(case.job, spec=case.job.spec.model_copy(update={"suspend": True}))
    case.downloader = pod("job-download-x", role="download", controller="j")
    assert case.look().download.removals == (case.child,)
    assert case.status.download is None
    assert case.message(Condition.SUSPENDED) == "1 pod is saving and ending: job-download-x"
    assert not holds(case.status, Condition.SUSPENDED), "its pod is left"
    case.child = case.downloader = None
    assert not case.look(at=2).download
    assert holds(case.status, Condition.SUSPENDED)
    case.edit(**CACHE)
    assert case.look(at=9).download.create
    assert (case.status.phase, case.status.summary.reason) == ("Pending", "Downloading")


def test_nothing_is_downloaded_for_a_job_that_is_refused_or_that_waits_for_kueue() -> None:
    case = Fetching()
    assert not case.look(obstacle=Obstacle(Reason.CLAIM_NOT_FOUND, "no claim")).download
    case = Fetching()
    case.job = replace(case.job, queue=Queue("team"))
    waits = case.look()
    assert (waits.download.create, waits.queue.create, waits.status.summary.reason) == (False, True, "Queued")


def test_a_model_and_rows_in_a_folder_need_no_download() -> None:
    case = Fetching(model={"path": "/models/tiny"})
    assert case.look().status.attempt == 0
    case = Fetching(model={"path": "/models/tiny"}, dataset={"name": "some/rows"})
    assert case.look().download.create


def _downloader(**spec: Any) -> dict[str, Any]:
    """Return the template of the pod that downloads."""
    one = job(**CACHE, **spec)
    return download_job(one, plan_topology(one))["spec"]["template"]


def test_its_pod_has_the_tokens_of_trainers_and_neither_gpus_nor_their_nodes() -> None:
    template = {
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "nodeSelector": {"gpu": "h200"},
        "resources": {"limits": {"memory": "900Gi"}},
        "tolerations": [{"key": "gpu"}],
    }
    model = {"name": "some/model", "revision": "v1"}
    made = _downloader(model=model, dataset={"name": "some/rows"}, podTemplate=template)
    (container,) = made["spec"]["containers"]
    assert "HF_TOKEN" in [variable["name"] for variable in container["env"]]
    assert {"readinessProbe", "ports"} & container.keys() == set()
    assert {"nodeSelector", "affinity"} & made["spec"].keys() == set()
    assert [one["name"] for one in container["volumeMounts"]] == ["tmp", "cache"]
    assert [one["name"] for one in made["spec"]["volumes"]] == ["tmp", "cache"]
    assert container["command"][-1] == (
        '{"model":"some/model","revision":"v1","datasets":[{"name":"some/rows","split":"train"}],"statusPort":29501}'
    )
    assert {"training.grpo.dev/group", "training.grpo.dev/attempt"} & made["metadata"]["labels"].keys() == set()


def test_its_pod_exists_under_a_quota_and_asks_for_no_more_than_a_trainer() -> None:
    def resources(**theirs: Any) -> Any:
        return _downloader(podTemplate={"resources": theirs})["spec"]["containers"][0]["resources"]

    own = {"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "500m", "memory": "2Gi"}}
    assert resources() == own
    assert resources(limits={"cpu": 96, "memory": "900Gi"}, requests={"cpu": "90.5"}) == own
    assert resources(limits={"cpu": "250m", "memory": "1e9"}) == {
        "limits": {"cpu": "250m", "memory": "8Gi"},
        "requests": {"cpu": "250m", "memory": "2Gi"},
    }
    small = resources(limits={"memory": "1000M", "ephemeral-storage": "1Ti"}, requests={"memory": "512Mi"})
    assert small["limits"] == {"cpu": "4", "memory": "1000M", "ephemeral-storage": "2Gi"}
    assert small["requests"] == {"cpu": "500m", "memory": "512Mi"}


def test_its_pod_plans_the_job_where_node_selectors_of_all_trainers_say_the_gpu() -> None:
    def wanted(**template: Any) -> Downloads:
        groups = [
            {"name": "a", "gpus": 1, "podTemplate": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}},
            {"name": "b", "gpus": 1, "podTemplate": template},
        ]
        made = _downloader(model={"name": "some/model"}, trainer={"groups": groups})
        return Downloads.model_validate_json(made["spec"]["containers"][0]["command"][-1])

    known = wanted(nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"})
    assert known.gpu_bytes == gpu_bytes("h100")
    assert known.contract.world_size == 2
    assert (wanted().contract, wanted().gpu_bytes) == (None, None)


def test_a_pod_that_leaves_with_a_lost_node_is_given_up() -> None:
    """Its Job makes no other one before it has ended, which nobody confirms."""
    case = Fetching()
    case.made()
    leaving = pod("job-download-x", role="download", node="n", deletion_time=NOW)
    seen = {"children": (case.child,), "downloaders": (leaving,)}
    assert nodes_to_check(observed(**seen), was_running=False) == {"n"}
    waits, ends = (case.see(at=at, lost_nodes={"n": NOW}, **seen).deletions for at in (10, 100))
    assert (waits, ends) == ((), (Deletion("Pod", leaving.name, leaving.uid, force=True),))


def test_init_containers_that_need_what_it_has_not_are_left_out() -> None:
    inits = [{"name": "a", "image": "i"}, {"name": "b", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]
    made = _downloader(podTemplate={"initContainers": inits})
    assert [init["name"] for init in made["spec"]["initContainers"]] == ["a"]


def test_what_a_job_was_accepted_with_is_what_it_requests() -> None:
    """A queue admits it by that, also if the operator is upgraded meanwhile."""
    case = Fetching()
    asked = PodRequests(cpu_per_gpu="3")
    made = plan(replace(case.job, requests=asked), case.topology, case.status, observed(), {}, NOW)
    assert made.status.pod_requests == asked
