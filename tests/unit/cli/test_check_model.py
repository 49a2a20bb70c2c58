"""`grpo check-model` says what works with a model, for a job or for examples of jobs, and exits accordingly."""

import os
import socket
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from transformers import AutoConfig

from grpo_cli.commands.check_model import EXAMPLES, lines
from grpo_cli.errors import CliError
from grpo_cli.local import programs
from grpo_cli.main import main
from support.families import FAMILIES, SIZES
from support.paths import EXAMPLES as JOBS
from support.trainer.tiny_model import make_tiny_model


def _check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check-model", *map(str, arguments)])


def test_a_model_is_checked_with_examples_of_jobs(tmp_path: Path) -> None:
    result = _check(make_tiny_model(tmp_path / "model", heads=4), "--gpus", 4, "--gpu-memory", "80Gi")
    first, *rest = result.output.splitlines()
    assert result.exit_code == 0
    assert first == str(tmp_path / "model")
    assert [line.split("  ")[0] for line in rest[:4]] == list(EXAMPLES)
    assert {line.split()[-1] for line in rest[:4]} == {"works"}
    found = [line.split("  ")[0] for line in rest[4:]]
    expected = ["files", "dtype", "family", "attention", "inputs", "lora", "push", "push", "tensor parallel"]
    assert found[:9] == expected
    assert found[-3:] == ["engine", "context", "chat template"]
    assert "each of 4 GPUs holds" in result.output


def test_a_job_is_checked_with_its_own_settings(tmp_path: Path) -> None:
    manifest = yaml.safe_load((JOBS / "one-node-4+1.yaml").read_text())
    manifest["spec"]["lora"] = {"push": "adapters"}
    (job := tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    config = AutoConfig.for_model("qwen3_moe", **SIZES | FAMILIES["qwen3_moe"] | {"max_position_embeddings": 32768})
    config.save_pretrained(tmp_path / "model")
    result = _check(tmp_path / "model", "--job", job)
    assert result.exit_code == 1
    assert result.output.splitlines()[1].split() == ["one-node", "refused"]
    assert "refused: lora.push: adapters cannot send those of parameters" in result.output
    assert result.output.count("refused: lora.push") == 1


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find_spec", lambda name: None if name == "torch" else name)
    result = _check("org/model")
    assert result.exit_code == 2
    assert "check-model needs torch: pip install 'grpo-operator[trainer]'" in result.output


def test_a_model_or_a_job_must_be_given() -> None:
    result = _check()
    assert result.exit_code == 2
    assert "give a MODEL, or --job" in result.output


def test_jobs_that_differ_in_an_aspect_are_named() -> None:
    same = [("files", "works", "a"), ("memory", "works", "m")]
    one = [same[0], ("push", "works", "b"), same[1]]
    two = [same[0], ("lora", "refused", "c"), ("push", "unknown", "d"), same[1]]
    shown = lines({"one": one, "two": two})
    assert [" ".join(line.split()) for line in shown] == [
        "files works: a",
        "lora refused: c",
        "push works (one): b",
        "push unknown (two): d",
        "memory works: m",
    ]


SILENT = """
import os, sys, threading
from huggingface_hub import hf_hub_download
from grpo_workload.data import hub_silence
hub_silence.SECONDS = 1
hub_silence.announce_silence()
threading.Timer(7, lambda: (print(len(sys.stdin.read()), flush=True), os._exit(0))).start()
hf_hub_download("some/model", "config.json")
"""


def test_a_hub_that_does_not_answer_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        at = f"http://127.0.0.1:{hub.getsockname()[1]}"
        for name, value in {"HF_ENDPOINT": at, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(programs, "POLL_SECONDS", 0.2)
        assert programs.ask("silent", "x" * 200_000) == 200_002, "all is asked, however late it is read"
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"waits for the hub: {at} has not answered for 1 s"), err


def test_of_a_program_that_fails_the_exception_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_hub.py").write_text("raise OSError('the hub does not answer.\\nSee the guide.')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CliError, match=r"exit code 1: OSError: the hub does not answer\.$"):
        programs.ask("no_hub", {})
