"""The page of `grpo ui` in headless Chromium: a run's curves, completions, errors and colours, and a job's plan."""

import json
import os
import shutil
import uuid
from functools import partial
from pathlib import Path

import pytest
import yaml
from selenium import webdriver
from selenium.webdriver.common.by import By

from grpo_cli.documents.manifest import load_job
from grpo_cli.ui.folder import FolderSource
from grpo_cli.ui.others import further_folders
from support.browser import complaints, open_page, text, texts, wait_for
from support.paths import EXAMPLES
from support.paths import RUN_FOLDER as RUN
from support.trainer.tiny_model import make_tiny_model

SCRIPT = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def test_curves_of_another_run_stand_in_the_same_charts(browser: webdriver.Chrome, run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(RUN, tmp_path / "other"))
    others = further_folders({"runs/other": FolderSource(other)})

    def lines() -> int:
        return len(browser.find_elements(By.CSS_SELECTOR, "[data-metric=reward] path.compared"))

    with open_page(browser, FolderSource(run), others=others):
        wait_for("the picker", lambda: text(browser, "#compare summary") == "Compare with")
        assert lines() == 0
        browser.find_element(By.CSS_SELECTOR, "#compare summary").click()
        wait_for("the other run", lambda: browser.find_elements(By.CSS_SELECTOR, "input[value='runs/other']"))
        browser.find_element(By.CSS_SELECTOR, "input[value='runs/other']").click()
        wait_for("its curve", lambda: lines() == 1)
        assert text(browser, "#compare .legend") == "runs/other"
        (value, last) = (text(browser, f"[data-metric=reward] {part}") for part in ("output", ".legend"))
        assert value == last, "it is the same run"
        browser.find_element(By.CSS_SELECTOR, "input[value='runs/other']").click()
        wait_for("one curve", lambda: lines() == 0)
        assert complaints(browser) == []


def test_the_ends_of_a_runs_logs_are_shown_as_they_are_now(browser: webdriver.Chrome, run: Path) -> None:
    (run / "logs").mkdir()
    (log := run / "logs" / "math-node-0.log").write_text(f"attempt 0: boom\n{SCRIPT}\n")
    with open_page(browser, FolderSource(run), "events"):
        wait_for("the log", lambda: "attempt 0: boom" in text(browser, "#events pre"))
        assert SCRIPT in text(browser, "#events pre")
        assert "end of the log of math-node-0" in text(browser, "#events h3")
        log.write_text("attempt 1: bang\n")
        wait_for("the newer log", lambda: text(browser, "#events pre").splitlines() == ["attempt 1: bang"])
        log.unlink()
        wait_for("no log", lambda: not text(browser, "#events pre"))
        assert complaints(browser) == []


def test_readmes_picture_is_made_of_a_run(browser: webdriver.Chrome, run: Path, tmp_path: Path) -> None:
    """`GRPO_PICTURES=docs/images` writes it there: README shows what the page is today."""
    folder = Path(os.environ.get("GRPO_PICTURES", tmp_path))
    named = Path(shutil.copytree(run, tmp_path / "default" / "quickstart" / str(uuid.UUID(int=0))))
    (named / "metrics.jsonl").touch()  # as while it trains
    with open_page(browser, FolderSource(named)):
        browser.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
        wait_for("the curves", lambda: len(browser.find_elements(By.CSS_SELECTOR, "#curves svg path.line")) > 8)
        assert text(browser, "#title") == "default/quickstart"
        assert browser.save_screenshot(str(folder / "ui.png"))
        assert texts(browser, "#curves [data-metric]")[0].startswith("reward")


def test_a_run_has_its_curves_which_grow_with_it(browser: webdriver.Chrome, run: Path) -> None:
    def points() -> int:
        line = "document.querySelector('[data-metric=reward] path.line')"
        return str(browser.execute_script(f"return {line}?.getAttribute('d')") or "").count(",")

    found = partial(browser.find_elements, By.CSS_SELECTOR)
    with open_page(browser, FolderSource(run)):
        wait_for("the reward's curve", lambda: points() == 8)
        rewards = [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert float(text(browser, "[data-metric=reward] output")) == pytest.approx(rewards[-1], abs=0.001)
        assert len(found("article[data-metric] svg")) >= 10
        wait_for("training, step by step", lambda: len(found("#phases rect.part-4")) == 8)
        assert "step 8" in text(browser, "#progress-text")
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last | {"step": 8, "reward": 0.123}) + "\n")
        wait_for("the ninth step", lambda: points() == 9)
        wait_for("its value", lambda: text(browser, "[data-metric=reward] output") == "0.123")
        browser.find_element(By.CSS_SELECTOR, ".picker summary").click()
        browser.find_element(By.CSS_SELECTOR, "input[value='num_tokens']").click()
        browser.find_element(By.CSS_SELECTOR, ".picker summary").click()
        wait_for("a metric that was picked", lambda: found("[data-metric=num_tokens] path.line"))
        browser.find_element(By.ID, "tab-ranks").click()
        wait_for("the ranks", lambda: len(found("#rank-table tbody tr")) == 3)
        assert complaints(browser) == []


def test_a_completion_is_text_whatever_it_says(browser: webdriver.Chrome, run: Path) -> None:
    row = {"step": 7, "completion": SCRIPT, "reward": 1.0, "advantage": -0.5}
    row |= {"prompt": [{"role": "user", "content": SCRIPT}]}
    (run / "completions.jsonl").write_text(json.dumps(row) + "\n")
    with open_page(browser, FolderSource(run), "completions"):
        wait_for("the completion", lambda: browser.find_elements(By.CSS_SELECTOR, ".answer"))
        assert texts(browser, ".said pre") == [SCRIPT, SCRIPT]
        assert browser.find_elements(By.CSS_SELECTOR, "main script, main img") == []
        assert text(browser, ".score.down b") == "-0.5"
        assert browser.title == "run · grpo"
        # If text ever became an element, the Content Security Policy would stop it.
        browser.execute_script("document.querySelector('main').innerHTML = arguments[0]", SCRIPT)
        wait_for("the complaint", lambda: any("Content Security Policy" in one for one in complaints(browser)))
        assert browser.title == "run · grpo"


def test_an_episode_is_shown_turn_by_turn_and_a_lost_one_by_its_cause(browser: webdriver.Chrome, run: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": SCRIPT},
        {"role": "assistant", "content": "It is 3."},
    ]
    facts = {"turns": 2, "calls": 1, "failed_calls": 1, "call_seconds": 0.5, "retries": 1, "tokens": [9, 4, 5]}
    row = {"step": 7, "prompt": "Add.", "completion": turns, "reward": 1.0, "advantage": 0.5, "episode": facts}
    none = row | {"completion": [], "reward": None, "episode": {"lost": "timeout", "failure": "it hangs", "retries": 2}}
    (run / "completions.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(none)}\n")
    with open_page(browser, FolderSource(run), "completions"):
        wait_for("both", lambda: len(browser.find_elements(By.CSS_SELECTOR, ".answer")) == 2)
        heads = ["prompt", "completion · 9 tokens", "tool add · 4 tokens read", "completion · 5 tokens", "prompt"]
        assert texts(browser, ".said .quiet") == heads
        assert texts(browser, ".said pre")[1:4] == ['→ add({"a":1})', SCRIPT, "It is 3."]
        assert "calls, 1 failed" in texts(browser, ".score .quiet")
        assert text(browser, ".answer p.bad") == "lost (timeout), counts nowhere: it hangs"


def test_steps_of_completions_can_be_paged(browser: webdriver.Chrome, run: Path) -> None:
    with open_page(browser, FolderSource(run), "completions"):
        wait_for("the newest step", lambda: "step 8, the newest" in text(browser, "#stepper output"))
        browser.find_element(By.CSS_SELECTOR, "#stepper button").click()
        assert text(browser, "#stepper output") == "step 7"
        rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
        assert texts(browser, ".said.own pre") == [row["completion"].strip() for row in rows if row["step"] == 6]


def test_an_empty_folder_and_a_deleted_folder_are_reported(
    browser: webdriver.Chrome, tmp_path: Path, run: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with open_page(browser, FolderSource(tmp_path / "empty")):
        wait_for("the empty state", lambda: "No step yet" in text(browser, ".empty"))
    with open_page(browser, FolderSource(run)):
        wait_for("curves", lambda: browser.find_elements(By.CSS_SELECTOR, "path.line"))
        shutil.rmtree(run)
        wait_for("the error", lambda: "does not exist" in text(browser, ".banner.bad"))
        assert text(browser, "#live") == "not live"
        assert browser.find_elements(By.CSS_SELECTOR, "path.line"), "what was known stays"


def test_the_page_follows_the_system_theme_unless_one_is_chosen(browser: webdriver.Chrome, run: Path) -> None:
    def brightness() -> float:
        color = browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(part) for part in color[4:-1].split(",")) / 3

    def prefer(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    with open_page(browser, FolderSource(run)):
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


def test_a_jobs_plan_is_shown_for_the_gpu_that_is_chosen(browser: webdriver.Chrome, run: Path, tmp_path: Path) -> None:
    source = FolderSource(run)
    with open_page(browser, source, "memory"):
        wait_for("curves: a folder has no plan", lambda: browser.find_elements(By.CSS_SELECTOR, "path.line"))
        assert not browser.find_element(By.ID, "tab-memory").is_displayed()
    manifest = yaml.safe_load((EXAMPLES / "one-node-4+1.yaml").read_text())
    manifest["spec"]["model"] = {"path": str(make_tiny_model(tmp_path / "model", heads=4))}
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    source.shown.to_plan = load_job(path).job("default")
    with open_page(browser, source, "memory"):
        wait_for("the question", lambda: "Which GPU?" in text(browser, "#memory .empty"))
        browser.find_element(By.CSS_SELECTOR, "#memory option[value=l4]").click()
        wait_for("the plan", lambda: texts(browser, "#verdict"))
        assert text(browser, "#verdict").splitlines()[-1] == "fits"
        assert "rank 0 (one-node-node-0), GiB of 22.0 GiB" in " ".join(text(browser, "#memory h3").split())
        assert {"forward+backward", "KV cache", "total"} <= set(texts(browser, "#memory th, #memory td"))
        assert complaints(browser) == []
