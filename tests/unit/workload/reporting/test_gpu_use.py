"""The GPU seconds that rank 0 adds up are those that passed, whoever trained, sampled, waited or was idle."""

import json
from pathlib import Path

from grpo_spec.reports import Progress
from grpo_workload.reporting.gpu_use import GpuUses
from grpo_workload.reporting.rank_metrics import RankStep
from grpo_workload.reporting.run_report import RunReport


def _rank(rank: int, *, idle: float | None = None, **seconds: float) -> RankStep:
    counts = dict.fromkeys(("generated_tokens", "sample_tokens", "longest_sample_tokens", "trained_tokens"), 1)
    return RankStep(rank=rank, seconds=seconds, fed_tokens=1, engines_idle_seconds=idle, **counts)


def test_ranks_that_sample_themselves_train_sample_and_wait() -> None:
    uses = GpuUses(attempt=2)
    assert uses.enter("Loading", 50.0) is None
    assert uses.enter("Preparing", 100.0) is None
    uses.enter("Preparing", 103.0)  # of another generation: the first step began at 100
    use = uses.step(110.0, [_rank(0, train=3.0, generate=5.0), _rank(1, train=3.0, generate=2.0)], 0)
    assert (use.attempt, use.training, use.sampling, use.waiting, use.idle) == (2, 6.0, 7.0, 7.0, 0.0)
    uses.evaluated(4.0)
    use = uses.step(120.0, [_rank(0, train=3.0, generate=2.0), _rank(1, train=3.0, generate=2.0)], 0)
    assert (use.training, use.sampling, use.waiting) == (12.0, 19.0, 9.0)
    uses.enter("Saving", 120.0)
    use = uses.enter("Done", 125.0)
    assert (use.training, use.sampling, use.waiting) == (12.0, 19.0, 19.0)
    assert use.training + use.sampling + use.waiting == 2 * (125 - 100)


def test_engines_sample_or_are_idle_while_ranks_train_or_wait() -> None:
    """Of three engine GPUs, none had a request in 4 s that both ranks saw."""
    uses = GpuUses(attempt=0)
    uses.enter("Preparing", 0.0)
    ranks = [_rank(0, idle=4.0, train=6.0, generate=3.0), _rank(1, idle=5.0, train=6.0, generate=2.0)]
    use = uses.step(10.0, ranks, 3)
    assert (use.training, use.sampling, use.waiting, use.idle) == (12.0, 18.0, 8.0, 12.0)


def test_a_clock_of_a_rank_that_is_wrong_counts_no_more_than_the_step() -> None:
    uses = GpuUses(attempt=0)
    uses.enter("Preparing", 0.0)
    use = uses.step(10.0, [_rank(0, train=700.0, generate=50.0)], 0)
    assert (use.training, use.sampling, use.waiting) == (10.0, 0.0, 0.0)


def test_the_progress_has_them_from_the_first_step_on(tmp_path: Path) -> None:
    report = RunReport(tmp_path / "run", tmp_path, total_steps=2, step=0, attempt=3)

    def said() -> Progress:
        return Progress.read(json.loads((tmp_path / "progress.json").read_text()))

    report.phase("Preparing")
    assert said().gpu_use is None
    metrics = {"reward": 0.5, "step_time": 1.0, "tokens_per_second": 2.0}
    report.step(0, metrics, [], [_rank(0, train=0.0, generate=0.0)], engine_gpus=2)
    first = said().gpu_use
    assert first is not None
    assert first.attempt == 3
    report.phase("Stopped")
    last = said().gpu_use
    assert last is not None
    assert last.waiting > first.waiting
    report.close()
