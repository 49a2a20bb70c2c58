"""examples/notebooks/local.ipynb, with a tiny model in place of one of the hub."""

from support.notebook import run_notebook
from support.trainer.trainings import lines_of


def test_a_notebook_trains_here(tiny_model, tmp_path):
    of_hub = '"name": "HuggingFaceTB/SmolLM2-135M-Instruct"'
    said = run_notebook("local.ipynb", tmp_path, {of_hub: f'"path": "{tiny_model}"'}, OMP_NUM_THREADS="1")
    assert "step 3 reward" in said
    (metrics,) = (tmp_path / "grpo-run").glob("**/metrics.jsonl")
    assert [line["step"] for line in lines_of(metrics)] == list(range(4))
    assert (tmp_path / "model/config.json").exists()
