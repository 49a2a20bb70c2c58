"""`grpo plan` says whether a job fits, part by part, and exits accordingly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from grpo_cli.main import main
from grpo_cli.screen.memory_plan import report
from support.paths import EXAMPLES
from support.trainer.tiny_model import make_tiny_model

GIB = 2**30


def _plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_a_job_of_a_tiny_model_fits_on_the_gpu_that_its_node_selector_says(tmp_path: Path) -> None:
    manifest = yaml.safe_load((EXAMPLES / "one-node-4+1.yaml").read_text())
    manifest["spec"]["podTemplate"] = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}
    (job := tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    result = _plan(job, "--model", make_tiny_model(tmp_path / "model", heads=4))
    assert result.exit_code == 0, result.output
    first = result.output.splitlines()[0].split()
    assert first[:6] == ["rank", "0", "(one-node-node-0),", "of", "22.0", "GiB"]
    assert first[6:] == ["load", "push", "generate", "forward+backward", "optimizer", "step", "save"]
    assert result.output.splitlines()[-1] == "fits"


def test_the_gpu_has_to_be_known() -> None:
    result = _plan(EXAMPLES / "one-node-4+1.yaml")
    assert result.exit_code == 2
    assert "give --gpu: h100, h200" in result.output
    for wrong in ("h1000", "80", "-80Gi"):  # 80 bytes are meant by nobody
        result = _plan(EXAMPLES / "one-node-4+1.yaml", "--gpu", wrong)
        assert f"{wrong} is neither one of h100," in result.output


def test_what_does_not_fit_is_said_with_edits() -> None:
    place = {"name": "rank 0 (p)", "isHost": False, "limit": 80 * GIB, "phases": {"load": {"weights": 90 * GIB}}}
    small = place | {"phases": {"load": {"weights": 9 * GIB}}}
    found: dict[str, Any] = {"places": [place], "tokens": 512, "chosenTokens": 512, "unknown": None, "ratio": None}
    found |= {"isSafe": False, "why": "rank 0 (p) needs 90.0 GiB"}
    found["proposals"] = [{"field": "parallelism.zeroStage", "value": 3, "places": [small]}]
    lines = list(report(found))
    assert lines[1].split() == ["weights", "90.00"]
    assert lines[-3] == "does not fit: rank 0 (p) needs 90.0 GiB"
    assert lines[-1] == "  parallelism.zeroStage: 3  (9.0 GiB at most)"
    assert list(report(found | {"proposals": []}))[-1] == "no single edit would make it fit"
