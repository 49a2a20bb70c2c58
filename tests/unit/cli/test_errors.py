"""Errors of `grpo` are one line that says what to do, with the exit codes of docs/cli.md."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from kubernetes.client.exceptions import ApiException

from grpo_cli.cluster.api_errors import explain, explained
from grpo_cli.cluster.kube import connect
from grpo_cli.errors import EXIT_CODES, CliError, Exit, no_job
from grpo_cli.main import COMMANDS, LazyGroup, main
from support.paths import DOCS


def refusal(status: int, message: str) -> ApiException:
    error = ApiException(status=status, reason="No")
    error.body = json.dumps({"message": message})
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (refusal(401, "Unauthorized"), 3, "log in"),
        (refusal(403, 'grpojobs is forbidden: User "me" cannot list resource'), 3, "not allowed"),
        (refusal(403, 'admission webhook "x" denied the request: forbidden'), 2, "refuses the request"),
        (refusal(403, 'pods "x" is forbidden: exceeded quota: compute'), 2, "refuses the request"),
        (refusal(404, "pods not found"), 4, "not found"),
        (refusal(409, 'Apply failed with 1 conflict: conflict with "kubectl"'), 2, "--force-conflicts"),
        (refusal(422, "spec.model: Invalid value"), 2, "refuses the request"),
        (refusal(500, "etcd is away"), 3, "answers 500"),
    ],
)
def test_each_refusal_has_its_code_and_what_to_do(error: Exception, code: int, words: str) -> None:
    shown = explain(error)
    assert shown.exit_code == code
    assert words in shown.message
    assert "\n" not in shown.message


def test_near_names_and_other_namespaces_are_named() -> None:
    def said(name: str, there: list[str], elsewhere: list[str]) -> str:
        return no_job(name, "team", there, lambda: elsewhere).message

    assert "did you mean math-7b?" in said("math7b", ["math-7b", "code"], [])
    assert "there is one in other: use --namespace" in said("math7b", ["math-7b"], ["other"])
    assert "there are a, b, c and others" in said("zzz", ["d", "c", "b", "a"], [])
    assert "grpo list --all-namespaces" in said("zzz", [], [])


def test_a_failed_request_is_one_line() -> None:
    @click.command()
    def broken() -> None:
        with explained():
            raise refusal(500, "line one\nline two")

    result = CliRunner().invoke(broken)
    assert result.exit_code == Exit.UNREACHABLE
    assert result.stderr == "Error: the API server answers 500: line one line two; try again\n"


def test_an_interrupt_ends_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def waits() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: waits)
    assert CliRunner().invoke(main, ["waits"]).exit_code == Exit.INTERRUPTED


def test_exit_codes_are_in_the_page_and_in_the_help_of_commands() -> None:
    page = (DOCS / "cli.md").read_text()
    for code in Exit:
        assert f"\n| {code.value} | " in page
        assert f"  {code.value} " in EXIT_CODES
    for name in COMMANDS:
        assert f"`grpo {name}" in page, f"docs/cli.md lacks {name}"
    for name in ("submit", "list", "status", "watch", "logs", "suspend", "resume", "diagnose", "cp", "export"):
        assert "Exit codes:" in CliRunner().invoke(main, [name, "--help"]).output


def test_a_manifest_needs_no_package_that_asks_a_cluster() -> None:
    """The workload's image has no kubernetes client; `grpo render` and `grpo run` work there."""

    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.modules['kubernetes'] = None; from grpo_cli.main import main; main(prog_name='grpo')"
        command = [sys.executable, "-c", code, *arguments]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)

    rendered = without("render", str(DOCS.parent / "examples/quickstart.yaml"), "--show", "ranks")
    assert "ranks" in rendered.stdout, rendered.stderr
    refused = without("status", "quickstart")
    assert refused.returncode == 2
    there = "without it there are check-model, plan, render, run\n"
    assert refused.stderr.endswith(f"status needs pip install 'grpo-operator[cli]'; {there}")


def kubeconfig(folder: Path) -> str:
    config: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "current-context": "one"}
    config["clusters"] = [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]
    config["users"] = [{"name": "u", "user": {}}]
    contexts = {"one": {"namespace": "team"}, "two": {}}
    config["contexts"] = [{"name": one, "context": {"cluster": "c", "user": "u"} | contexts[one]} for one in contexts]
    (path := folder / "config").write_text(yaml.safe_dump(config))
    return str(path)


def test_the_namespace_is_the_options_or_the_contexts_or_default(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path)
    assert connect(path, None, None).namespace == "team"
    assert connect(path, "two", None).namespace == "default"
    assert connect(path, "two", "mine").namespace == "mine"


def test_a_manifest_and_an_option_on_either_side_of_the_command_with_different_namespaces_are_refused(
    tmp_path: Path,
) -> None:
    example = yaml.safe_load(next(iter((DOCS.parent / "examples").glob("one-node*.yaml"))).read_text())
    example["metadata"]["namespace"] = "team"
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(example))
    where = ["-n", "mine", "--context", "two", "--kubeconfig", kubeconfig(tmp_path)]
    command = ["submit", str(manifest)]
    for line in ([*command, *where], [*where, *command], ["-n", "x", *where[2:], *command, *where[:2]]):
        result = CliRunner().invoke(main, line)
        assert result.exit_code == Exit.INVALID
        assert "says namespace team, and --namespace mine" in result.stderr, line
    result = CliRunner().invoke(main, ["--context", "two", "convert", str(manifest)])
    assert (result.exit_code, "convert asks no cluster, and takes no --context" in result.stderr) == (2, True)


def test_a_wrong_manifest_is_refused_without_a_cluster(tmp_path: Path) -> None:
    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: c}\n"
    for text, words in (
        ("a: [", "not YAML"),
        (claim, "found: PersistentVolumeClaim"),
        ("kind: GRPOJob", "apiVersion: Field required"),
        (f"{claim}---\nkind: Pod\n", "document 2 of 2: Pod: apiVersion is missing"),
        (f"{claim}---\n7\n", "document 2 of 2: a document must be an object of Kubernetes (found 7)"),
    ):
        manifest = tmp_path / "job.yaml"
        manifest.write_text(text)
        result = CliRunner().invoke(main, ["submit", str(manifest), "--kubeconfig", kubeconfig(tmp_path)])
        assert result.exit_code == Exit.INVALID
        assert words in result.stderr


def test_the_message_of_an_error_is_one_line() -> None:
    assert CliError("a\n  b", Exit.FAILED).message == "a b"
