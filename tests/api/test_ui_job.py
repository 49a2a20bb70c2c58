"""The page of `grpo ui` in headless Chromium shows a job of a real API server, or that the server does not answer."""

import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from grpo_cli.cluster.kube import connect
from grpo_cli.commands.ui import other_jobs
from grpo_cli.ui.cluster import ClusterSource
from grpo_cli.ui.source import SourceError
from grpo_spec.contract import Contract
from grpo_spec.reports import Progress
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.status_server import Status, serving
from grpo_workload.reporting.progress_files import write_progress
from support.browser import complaints, in_a_thread, open_page, text, wait_for
from support.control_plane.operators import Jobs, make_job
from support.paths import RUN_FOLDER as RUN
from support.trainer.launchers import free_ports

SCRIPT = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"


def _place(jobs: Jobs, name: str, attempt: int, tmp_path: Path) -> Place:
    contract = Contract.model_validate_json(jobs.get("configmap", f"{name}-{attempt}")["data"]["contract.json"])
    data = tmp_path / "data"
    shutil.copytree(RUN, data / contract.job.run, dirs_exist_ok=True)
    here = {"state_dir": tmp_path, "termination_log": tmp_path / "termination-log", "data_dir": data}
    return Place(contract=contract, pod=contract.master.pod, pod_uid="", **here)


def test_a_job_has_its_curves_groups_pods_conditions_and_failure(
    browser: webdriver.Chrome, jobs: Jobs, grpo: Any, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.run("shown", failurePolicy={"maxRestarts": 0}, rendezvous={"statusPort": free_ports(1)[0]})
    source = ClusterSource(connect(str(kubeconfig), None, jobs.namespace), "shown")
    source.refresh()
    assert "no connection to pod shown-a-0" in source.shown.note, "a fake node forwards no ports"
    write_progress(tmp_path, Progress(step=8, total_steps=40, advice="run 3 engines in place of 2"))
    launcher = serving(Status(_place(jobs, "shown", 0, tmp_path)))  # fake nodes run no pods
    with in_a_thread(launcher), open_page(browser, source, "ranks"):

        def directly(_api: object, _namespace: str, pod: str, port: int, path: str) -> Any:
            assert pod == "shown-a-0"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return json.loads(answer.read())

        monkeypatch.setattr("grpo_cli.cluster.launchers.get_json", directly)
        wait_for("the ranks", lambda: "shown-b-0" in text(browser, "#rank-table tbody tr:nth-child(3)"))
        wait_for("the phase", lambda: text(browser, "#phase") == "Running")
        wait_for("the advice", lambda: "Advice run 3 engines in place of 2" in text(browser, "#banners"))
        said = grpo("status", "shown", "--completions")
        last = json.loads((RUN / "completions.jsonl").read_text().splitlines()[-1])
        assert said.exit_code == 0, said.output
        assert last["completion"].splitlines()[0] in said.output, "a completion of the newest step"
        assert "step 7  " not in said.output, "and of no other"
        browser.find_element(By.ID, "tab-curves").click()
        wait_for("the reward's curve", lambda: browser.find_elements(By.CSS_SELECTOR, "[data-metric=reward] path.line"))
        browser.find_element(By.ID, "tab-ranks").click()
        assert "1 of 1 ready" in text(browser, "#ranks")
        assert {"shown-a-0", "shown-b-0"} <= set(text(browser, "#ranks table").split())
        jobs.fail("shown-b-0", f"rank 2: ValueError: {SCRIPT}")
        wait_for("the failure", lambda: "RankFailed: shown-b-0" in text(browser, "#failure b"))
        assert f"rank 2: ValueError: {SCRIPT}" in text(browser, "#failure pre")
        wait_for("the end", lambda: text(browser, "#phase") == "Failed")
        browser.find_element(By.ID, "tab-events").click()
        assert "Failed" in text(browser, "#events table")
        assert complaints(browser) == []
    with pytest.raises(SourceError, match=r"no job show in namespace .* did you mean shown"):
        ClusterSource(connect(str(kubeconfig), None, jobs.namespace), "show").refresh()


async def test_other_jobs_of_the_namespace_can_be_compared(jobs: Jobs, kubeconfig: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        jobs.apply(make_job(name, rendezvous={"statusPort": free_ports(1)[0]}))
    others = other_jobs("one", str(kubeconfig), None, jobs.namespace, tmp_path)
    assert await others.names() == ["two"]
    assert (await others.curves("two"))["metrics"] == []
    with pytest.raises(SourceError, match="there is no run three"):
        await others.curves("three")


def test_a_cluster_that_does_not_answer_is_reported(
    browser: webdriver.Chrome, kubeconfig: Path, tmp_path: Path
) -> None:
    away = tmp_path / "kubeconfig"
    away.write_text(re.sub("server: .*", "server: https://127.0.0.1:1", kubeconfig.read_text()))
    with open_page(browser, ClusterSource(connect(str(away), None, "default"), "any")):
        wait_for("the error", lambda: "the API server does not answer" in text(browser, ".banner.bad"))
        assert "Nothing has been read yet" in text(browser, ".banner.bad")
