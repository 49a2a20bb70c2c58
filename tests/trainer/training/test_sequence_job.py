"""A job whose ranks share sequences samples, scores and learns what one with as many ranks of their own does.

Each continues as the other one began: its third step is trained after a checkpoint of the other kind.
"""

import pytest

from grpo_spec.reports import ExitCode
from support.trainer.trainings import lines_of, make_config


@pytest.mark.vllm
def test_a_job_whose_ranks_share_sequences_has_the_metrics_of_one_whose_ranks_do_not(
    start_training, tiny_model, tmp_path
):
    curves = {}
    for sequence in (1, 2):
        uid = f"sequence-{sequence}"
        config = make_config(tiny_model, max_steps=2, engine="vLLM")
        config["parallelism"] = {"zeroStage": 3, "gradientCheckpointing": True, "sequence": sequence}
        config["training"] |= {"promptsPerStep": 3, "beta": 0.1, "klInReward": True}  # the ranks sample two and one
        config["storage"] = {"checkpointEverySteps": 1}
        for max_steps, size in ((2, sequence), (3, 3 - sequence)):
            config["training"]["maxSteps"], config["parallelism"]["sequence"] = max_steps, size
            ranks = start_training(config, 2, uid=uid)
            assert ranks.exit_codes() == [ExitCode.DONE] * 2, ranks.logs()
        curves[sequence] = lines_of(tmp_path / "data/ns/job" / uid / "metrics.jsonl")
    timed = ("time", "tokens_per_second", "step_time", "ranks", "padding_fraction")  # or of the plan
    for alone, shared in zip(curves[1], curves[2], strict=True):
        assert alone["grad_norm"] > 0
        for name, value in alone.items():
            if not name.startswith(timed):
                assert shared[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        if alone is curves[1][2]:
            alone, shared = shared, alone
        edges = [f"ranks/trained_tokens/{which}" for which in ("min", "max")]
        assert sum(shared[edge] for edge in edges) == sum(alone[edge] for edge in edges)
        assert shared[edges[1]] - shared[edges[0]] <= 1, "both ranks train on the same samples, half of the tokens each"
