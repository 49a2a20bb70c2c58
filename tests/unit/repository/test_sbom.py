"""`make sbom` lists every locked package with its hashes, writes the same bytes each time, and names no machine."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT


def _write(folder: Path) -> dict[str, bytes]:
    # Not validated here, which takes 20 s: `make sbom` does.
    subprocess.run([ROOT / "scripts" / "sbom.sh", folder, "--no-validate"], check=True, capture_output=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return _write(tmp_path_factory.mktemp("first"))


@pytest.mark.parametrize("lock", ["operator", "cpu", "gpu"])
def test_every_locked_package_is_listed_with_its_hashes(bills: dict[str, bytes], lock: str) -> None:
    bill = json.loads(bills[f"sbom-{lock}.cdx.json"])
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "grpo-operator")
    pins = set(re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))
    assert {(c["name"], c["version"]) for c in bill["components"]} == pins
    assert all(c["externalReferences"][0]["hashes"] for c in bill["components"])


def test_bills_are_the_same_each_time_and_name_no_machine(bills: dict[str, bytes], tmp_path: Path) -> None:
    assert _write(tmp_path) == bills
    for text in (content.decode() for content in bills.values()):
        assert str(Path.home()) not in text
        assert str(ROOT) not in text
        hosts = set(re.findall(r"https?://([^/\"\s]+)", text))
        own = {"pypi.org", "github.com", "cyclonedx.org"}  # of the packages and of the tool itself
        assert {host for host in hosts if not host.endswith(".readthedocs.io")} == own
