"""`grpo render` prints ranks and engines, configurations, and YAML that kubectl takes."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from grpo_cli.main import main
from support.paths import EXAMPLES


def _render(name: str, *args: str) -> Result:
    return CliRunner().invoke(main, ["render", str(EXAMPLES / name), *args])


def test_the_table_has_every_rank_and_engine_with_its_devices() -> None:
    shown = _render("one-node-4+1.yaml", "--show", "ranks").output.splitlines()
    assert shown[0] == "# 1 pod, 4 ranks, 1 vLLM server"
    assert shown[1].split() == ["#", "ROLE", "RANK", "POD", "GROUP", "DEVICE", "NOTE"]
    assert shown[2].split() == ["#", "trainer", "0", "one-node-node-0", "node", "0", "master,", "sends", "weights"]
    assert shown[6].split()[:6] == ["#", "engine", "one-node-node-0/0", "node", "4", "TP"]


def test_colocated_engines_are_numbered_by_their_tensor_parallel_group() -> None:
    shown = _render("colocate-7b-tp.yaml", "--show", "ranks").output
    assert "vLLM 0, TP rank 3" in shown
    assert "vLLM 1, TP rank 0" in shown


def test_the_generated_configurations_are_shown() -> None:
    shown = _render("colocate-72b-zero3-offload.yaml", "--show", "configs").output
    for line in ('"stage": 3', '"device": "cpu"', '"overlap_comm": true', '"contiguous_gradients": true'):
        assert line in shown
    accelerate = yaml.safe_load("\n".join(line[1:] for line in shown.split("accelerate.yaml")[1].splitlines()[1:]))
    assert accelerate["num_machines"] == 4
    assert accelerate["num_processes"] == 32
    assert accelerate["rdzv_backend"] == "static"
    assert accelerate["main_process_ip"] == "colocate-72b-node-0.colocate-72b.default.svc"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_the_whole_output_is_yaml_of_the_objects(name: str) -> None:
    result = _render(name)
    assert result.exit_code == 0, result.output
    kinds = [document["kind"] for document in yaml.safe_load_all(result.output)]
    policies = ["NetworkPolicy"] * (2 if "component: generation" in result.output else 1)
    assert list(dict.fromkeys(kinds)) == ["Service", "NetworkPolicy", "ConfigMap", "StatefulSet"]
    assert [kind for kind in kinds if kind != "StatefulSet"] == ["Service", *policies, "ConfigMap"]


def test_an_invalid_manifest_is_reported_without_a_traceback(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text((EXAMPLES / "one-node-4+1.yaml").read_text().replace("gpus: 5", "gpus: 1"))
    result = CliRunner().invoke(main, ["render", str(manifest)])
    assert result.exit_code == 2
    assert "generation.nodeLocal.gpusPerNode must leave every trainer pod at least one GPU" in result.output
