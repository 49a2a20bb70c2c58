"""With cache.prefetch, a Job without GPUs downloads before the first attempt, and says how far it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.lifecycle import after
from grpo_operator.decide.observe import Child, read_child
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import Mode, Obstacle, Plan, plan
from grpo_operator.layout.downloads import download_job
from grpo_operator.layout.topology import Queue, plan_topology
from grpo_spec.contract import Downloads
from grpo_spec.gpus import gpu_bytes
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress
from support.control_plane.jobs import NOW, ended, job, observed, pod
from support.control_plane.passes import Case

CACHE = {"cache": {"claimName": "models", "prefetch": True}}


class Fetching(Case):
    """A job whose model is downloaded first."""

    def __init__(self, **spec: Any) -> None:
        self.edit(**CACHE, **spec)
        self.status = GRPOJobStatus()
        self.child: Child | None = None
        self.downloader: ObservedPod | None = None

    def made(self, *states: str) -> None:
        """Let the Job exist, in these conditions."""
        raw = download_job(self.job, self.topology)
        raw["metadata"] |= {"uid": "j", "resourceVersion": "1"}
        raw["status"] = {"conditions": [{"type": kind, "status": "True", "message": "too often"} for kind in states]}
        self.child = read_child("Job", raw)

    def look(self, at: int = 0, obstacle: Obstacle | None = None, said: str = "") -> Plan:
        """Plan one pass."""
        seen = replace(
            observed(),
            children=(self.child,) if self.child else (),
            downloaders=(self.downloader,) if self.downloader else (),
            has_queues=True,
        )
        reports = {self.downloader.name: Progress(phase=said)} if said and self.downloader else {}
        self.last = plan(self.job, self.topology, self.status, seen, reports, after(NOW, at), obstacle)
        self.status = self.last.status
        return self.last


def test_nothing_of_the_job_asks_for_gpus_until_the_model_is_there() -> None:
    case = Fetching()
    first = case.look()
    assert (first.download.create, first.mode, first.status.attempt) == (True, Mode.KEEP, None)
    case.made()
    case.downloader = replace(pod("job-download-x"), downloads=True)
    waits = case.look(at=5, said="downloads tiny: 1.50 of 9.00 GB")
    assert (waits.status.phase, waits.status.summary.reason, waits.download.create) == ("Pending", "Downloading", False)
    assert waits.status.summary.message == (
        "no GPU is asked for yet; pod job-download-x: downloads tiny: 1.50 of 9.00 GB"
    )
    case.made("Complete")
    begun = case.look(at=60)
    assert (begun.status.attempt, begun.mode, begun.download.removals) == (0, Mode.RUN, (case.child,))
    assert begun.status.active_since == after(NOW, 60), "the clock of deadlines begins with the first attempt"


def test_a_download_that_is_given_up_ends_the_job_and_says_why() -> None:
    for code, reason in ((64, "ConfigError"), (1, "DownloadFailed")):
        case = Fetching()
        case.made("Failed")
        case.downloader = replace(pod("job-download-x"), downloads=True, endings=(Ending(ended(code, "Error")),))
        case.look()
        assert (case.status.phase, case.status.summary.reason) == ("Failed", reason)
        where = f"download pod job-download-x on node node, exit code {code}"
        assert case.message(Condition.FAILED) == f"{where}: the download into the cache failed: said Error"
        assert not case.look(at=9).download, "its pod's log says more"
    case = Fetching()
    case.made("Failed")
    case.look()
    assert case.message(Condition.FAILED).endswith("failed: too often")


def test_a_suspended_job_downloads_nothing_and_goes_on_later() -> None:
    case = Fetching()
    case.made()
    case.job = replace(case.job, spec=case.job.spec.model_copy(update={"suspend": True}))
    assert case.look().download.removals == (case.child,)
    case.child = None
    assert not case.look(at=2).download
    case.edit(**CACHE)
    assert case.look(at=9).download.create


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


def test_its_pod_has_the_tokens_of_trainers_and_neither_gpus_nor_their_nodes() -> None:
    template = {
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "nodeSelector": {"gpu": "h200"},
        "resources": {"limits": {"memory": "900Gi"}},
        "tolerations": [{"key": "gpu"}],
    }
    one = job(
        **CACHE, model={"name": "some/model", "revision": "v1"}, dataset={"name": "some/rows"}, podTemplate=template
    )
    made = download_job(one, plan_topology(one))["spec"]["template"]
    (container,) = made["spec"]["containers"]
    assert "HF_TOKEN" in [variable["name"] for variable in container["env"]]
    assert {"resources", "readinessProbe"} & container.keys() == set()
    assert {"nodeSelector", "affinity"} & made["spec"].keys() == set()
    assert [one["name"] for one in container["volumeMounts"]] == ["tmp", "cache"]
    assert [one["name"] for one in made["spec"]["volumes"]] == ["tmp", "cache"]
    assert container["command"][-1] == (
        '{"model":"some/model","revision":"v1","datasets":[{"name":"some/rows","split":"train"}],"statusPort":29501}'
    )
    assert {"training.grpo.dev/group", "training.grpo.dev/attempt"} & made["metadata"]["labels"].keys() == set()


def test_its_pod_plans_the_job_where_node_selectors_of_all_trainers_say_the_gpu() -> None:
    def wanted(**template: Any) -> Downloads:
        groups = [
            {"name": "a", "gpus": 1, "podTemplate": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}},
            {"name": "b", "gpus": 1, "podTemplate": template},
        ]
        one = job(**CACHE, model={"name": "some/model"}, trainer={"groups": groups})
        made = download_job(one, plan_topology(one))["spec"]["template"]["spec"]["containers"][0]["command"][-1]
        return Downloads.model_validate_json(made)

    known = wanted(nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"})
    assert known.gpu_bytes == gpu_bytes("h100")
    assert known.contract is not None
    assert known.contract.world_size == 2
    assert (wanted().contract, wanted().gpu_bytes) == (None, None)


def test_the_message_quotes_the_last_failure_while_it_is_tried_again() -> None:
    case = Fetching()
    case.made()
    early, late = (
        replace(pod(name), downloads=True, endings=(Ending(ended(1, f"by {name}", at=at)),))
        for name, at in (("job-download-z", NOW), ("job-download-a", after(NOW, 9)))
    )
    seen = replace(observed(), children=(case.child,), downloaders=(early, late))
    waits = plan(case.job, case.topology, case.status, seen, {}, after(NOW, 10))
    assert waits.status.summary.message == "the download is tried again: said by job-download-a"
    done = replace(early, endings=(Ending(ended(-1, Reason.OUTCOME_MISSING)),))
    waits = plan(case.job, case.topology, case.status, replace(seen, downloaders=(done,)), {}, NOW)
    assert waits.status.summary.message == "no GPU is asked for yet"
