"""examples/notebooks/local.ipynb, with a tiny model in place of one of the hub."""

import json
from pathlib import Path

from support.notebook import run_notebook


def test_a_notebook_trains_here(tiny_model: Path, tmp_path: Path) -> None:
    of_hub = '"name": "HuggingFaceTB/SmolLM2-135M-Instruct"'
    said = run_notebook("local.ipynb", tmp_path, {of_hub: f'"path": "{tiny_model}"'}, OMP_NUM_THREADS="1")
    assert "step 3 reward" in said
    (metrics,) = (tmp_path / "grpo-run").glob("**/metrics.jsonl")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(4))
    assert (tmp_path / "model/config.json").exists()
