"""The page of `grpo ui` in headless Chromium: a run's folder, and a job of a real API server."""

import asyncio
import json
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from operator_fixture import Jobs, make_job, outcome
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from grpo_cli.kube import connect
from grpo_cli.ui.cluster import ClusterSource
from grpo_cli.ui.folder import FolderSource
from grpo_cli.ui.server import serving
from grpo_cli.ui.source import Source, SourceError
from grpo_devcluster import packages
from grpo_devcluster.progress import wait_until
from grpo_workload.contract import Contract
from grpo_workload.status_server import Status, application
from grpo_workload.world import Place

pytestmark = pytest.mark.api

RUN = Path(__file__).parents[1] / "unit" / "run_folder"
SCRIPT = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    packages.ensure(packages.BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = str(packages.find("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,950"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(packages.find("chromedriver")))
    yield driver
    driver.quit()


@contextmanager
def _page(browser: webdriver.Chrome, source: Source, view: str = "") -> Iterator[str]:
    """The page of `source`, open in the browser; the server runs in a thread of its own."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[str] = []
    ended = asyncio.Event()

    async def serve() -> None:
        async with serving(source, 0) as address:
            found.append(address)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        browser.get(f"{found[0]}#{view}")
        yield found[0]
    finally:
        browser.get("about:blank")
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def _texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    """In one go: the page may draw itself anew between two questions."""
    found = browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)", selector)
    return [str(one) for one in found]


def _text(browser: webdriver.Chrome, selector: str) -> str:
    return " ".join(_texts(browser, selector))


def _wait(what: str, holds: Callable[[], Any]) -> None:
    wait_until(lambda: bool(holds()), what, 30, interval=0.2)


def _complaints(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def test_a_run_has_its_curves_and_grows_while_it_is_looked_at(browser: webdriver.Chrome, run: Path) -> None:
    def points() -> int:
        path = browser.execute_script("return document.querySelector('[data-metric=reward] path.line')?.getAttribute('d')")
        return str(path or "").count(",")

    with _page(browser, FolderSource(run)):
        _wait("the reward's curve", lambda: points() == 8)
        rewards = [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert float(_text(browser, "[data-metric=reward] output")) == pytest.approx(rewards[-1], abs=0.001)
        assert len(browser.find_elements(By.CSS_SELECTOR, "article[data-metric] svg")) >= 10
        _wait("seconds of training, step by step", lambda: len(browser.find_elements(By.CSS_SELECTOR, "#phases rect.part-4")) == 8)
        assert "step 8" in _text(browser, "#progress-text")
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last | {"step": 8, "reward": 0.123}) + "\n")
        _wait("the ninth step", lambda: points() == 9)
        _wait("its value", lambda: _text(browser, "[data-metric=reward] output") == "0.123")
        browser.find_element(By.CSS_SELECTOR, ".picker summary").click()
        browser.find_element(By.CSS_SELECTOR, "input[value='num_tokens']").click()
        browser.find_element(By.CSS_SELECTOR, ".picker summary").click()
        _wait("a metric that was picked", lambda: browser.find_elements(By.CSS_SELECTOR, "[data-metric=num_tokens] path.line"))
        browser.find_element(By.ID, "tab-ranks").click()
        _wait("the ranks", lambda: len(browser.find_elements(By.CSS_SELECTOR, "#rank-table tbody tr")) == 3)
        assert _complaints(browser) == []


def test_a_completion_is_text_whatever_it_says(browser: webdriver.Chrome, run: Path) -> None:
    row = {"step": 7, "prompt": [{"role": "user", "content": SCRIPT}], "completion": SCRIPT, "reward": 1.0, "advantage": -0.5}
    (run / "completions.jsonl").write_text(json.dumps(row) + "\n")
    with _page(browser, FolderSource(run), "completions"):
        _wait("the completion", lambda: browser.find_elements(By.CSS_SELECTOR, ".answer"))
        assert _texts(browser, ".said pre") == [SCRIPT, SCRIPT]
        assert browser.find_elements(By.CSS_SELECTOR, "main script, main img") == []
        assert _text(browser, ".score.down b") == "-0.5"
        assert browser.title == "run · grpo"
        # Should one ever become an element: the policy stops it.
        browser.execute_script("document.querySelector('main').innerHTML = arguments[0]", SCRIPT)
        _wait("the policy's word", lambda: any("Content Security Policy" in complaint for complaint in _complaints(browser)))
        assert browser.title == "run · grpo"


def test_steps_of_completions_are_turned_over(browser: webdriver.Chrome, run: Path) -> None:
    with _page(browser, FolderSource(run), "completions"):
        _wait("the newest step", lambda: "step 8, the newest" in _text(browser, "#stepper output"))
        browser.find_element(By.CSS_SELECTOR, "#stepper button").click()
        assert _text(browser, "#stepper output") == "step 7"
        rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
        assert _texts(browser, ".said.own pre") == [row["completion"].strip() for row in rows if row["step"] == 6]


def test_nothing_to_show_and_a_source_that_is_gone_are_told(browser: webdriver.Chrome, tmp_path: Path, run: Path) -> None:
    (tmp_path / "empty").mkdir()
    with _page(browser, FolderSource(tmp_path / "empty")):
        _wait("the empty state", lambda: "No step yet" in _text(browser, ".empty"))
    with _page(browser, FolderSource(run)):
        _wait("curves", lambda: browser.find_elements(By.CSS_SELECTOR, "path.line"))
        shutil.rmtree(run)
        _wait("the error", lambda: "there is no folder" in _text(browser, ".banner.bad"))
        assert _text(browser, "#live") == "not live"
        assert browser.find_elements(By.CSS_SELECTOR, "path.line"), "what was known stays"


def test_dark_is_dark(browser: webdriver.Chrome, run: Path) -> None:
    def brightness() -> float:
        color = browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(part) for part in color[4:-1].split(",")) / 3

    def prefer(scheme: str) -> None:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    with _page(browser, FolderSource(run)):
        prefer("light")
        assert brightness() > 200
        prefer("dark")
        assert brightness() < 40
        theme = browser.find_element(By.ID, "theme")
        theme.click()
        assert brightness() > 200, "light, whatever the system says"
        theme.click()
        theme.click()
        prefer("light")


@contextmanager
def _launcher(place: Place) -> Iterator[str]:
    """The launcher's own server on loopback, where fake nodes run no pods; gives its address."""
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[int] = []

    async def serve() -> None:
        runner = web.AppRunner(application(Status(place)))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(runner.addresses[0][1])
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def _place(jobs: Jobs, name: str, epoch: int, tmp_path: Path) -> Place:
    contract = Contract.model_validate_json(jobs.get("configmap", f"{name}-{epoch}")["data"]["contract.json"])
    data = tmp_path / "data"
    shutil.copytree(RUN, data / contract.job.run, dirs_exist_ok=True)
    return Place(
        contract=contract,
        member=contract.master,
        group_rank=0,
        pod_uid="",
        state_dir=tmp_path,
        termination_log=tmp_path / "termination-log",
        data_dir=data,
    )


def test_a_job_has_its_curves_groups_pods_conditions_and_failure(
    browser: webdriver.Chrome, jobs: Jobs, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.apply(make_job("shown", failurePolicy={"maxRestarts": 0}))
    jobs.wait_for("shown", "Running", "True")
    source = ClusterSource(connect(str(kubeconfig), None, jobs.namespace), "shown")
    source.refresh()
    assert "no connection to pod shown-a-0" in source.shown.note, "a fake node forwards no ports"
    with _launcher(_place(jobs, "shown", 0, tmp_path)) as address, _page(browser, source, "ranks"):

        def directly(_api: object, _namespace: str, pod: str, _port: int, path: str) -> Any:
            assert pod == "shown-a-0"
            with urllib.request.urlopen(address + path, timeout=10) as answer:
                return json.loads(answer.read())

        monkeypatch.setattr("grpo_cli.launcher.get_json", directly)
        _wait("the ranks", lambda: "shown-b-0" in _text(browser, "#rank-table tbody tr:nth-child(3)"))
        _wait("the phase", lambda: _text(browser, "#phase") == "Running")
        browser.find_element(By.ID, "tab-curves").click()
        _wait("the reward's curve", lambda: browser.find_elements(By.CSS_SELECTOR, "[data-metric=reward] path.line"))
        browser.find_element(By.ID, "tab-ranks").click()
        assert "1 of 1 ready" in _text(browser, "#ranks")
        assert {"shown-a-0", "shown-b-0"} <= set(_text(browser, "#ranks table").split())
        jobs.finish_pod("shown-b-0", 70, outcome(70, "RankFailed", f"rank 2: ValueError: {SCRIPT}"))
        _wait("the failure", lambda: "RankFailed: shown-b-0" in _text(browser, "#failure b"))
        assert f"rank 2: ValueError: {SCRIPT}" in _text(browser, "#failure pre")
        _wait("the end", lambda: _text(browser, "#phase") == "Failed")
        browser.find_element(By.ID, "tab-events").click()
        assert "Failed" in _text(browser, "#events table")
        assert _complaints(browser) == []
    with pytest.raises(SourceError, match=r"no job show in namespace .* did you mean shown"):
        ClusterSource(connect(str(kubeconfig), None, jobs.namespace), "show").refresh()


def test_a_cluster_that_is_away_is_told(browser: webdriver.Chrome, kubeconfig: Path, tmp_path: Path) -> None:
    away = tmp_path / "kubeconfig"
    away.write_text(
        "\n".join(
            f"{line.split('server:')[0]}server: https://127.0.0.1:1" if "server:" in line else line
            for line in kubeconfig.read_text().splitlines()
        )
    )
    with _page(browser, ClusterSource(connect(str(away), None, "default"), "any")):
        _wait("the error", lambda: "the API server does not answer" in _text(browser, ".banner.bad"))
        assert "Nothing has been read yet" in _text(browser, ".banner.bad")
