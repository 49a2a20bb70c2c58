"""A job whose rank is killed again and again trains as one whose rank is not: every step once, with the same numbers.

So engines that went on had the weights of the checkpoint, and not newer ones that they had got before.
"""

from contextlib import suppress

import psutil
import pytest
from benchmarks.common.models import make_model
from benchmarks.common.runs import run_job
from benchmarks.training.rank_kills import is_rank, spec

from grpo_devcluster.progress import wait_until

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]

STEPS = 10
SECONDS = 840.0  # for a job, on a busy machine
FORGETS = "setting pause state"
"""vLLM's line in the log when a rank that has just loaded ends what an earlier attempt left in an engine."""


class Killer:
    """Kills the rank as soon as so many steps are finished and it is in a phase; FORGETS is the engine's word."""

    def __init__(self, folder, plan):
        self._folder, self.left = folder, list(plan)

    def __call__(self, finished):
        if not self.left or finished < self.left[0][0]:
            return
        _, where = self.left[0]
        before = len(self._engine_log())
        with suppress(TimeoutError):
            if where == FORGETS:
                wait_until(lambda: FORGETS in self._engine_log()[before:], where, 120, interval=0.01)
            else:
                wait_until(lambda: self._phase() == where, where, 20, interval=0.001)
            for rank in filter(is_rank, psutil.Process().children(recursive=True)):
                rank.kill()
                self.left.pop(0)

    def _phase(self):
        with suppress(OSError):  # an attempt that begins forgets them
            for phase in self._folder.glob("run/*/pods/bench-t-0/phases/0"):
                return phase.read_text()
        return ""

    def _engine_log(self):
        return "".join(log.read_text() for log in self._folder.glob("run/*/pods/bench-e-0/launcher.log"))


def train(folder, plan):
    """Return the metrics of all steps of a job whose rank is killed as `plan` says."""
    folder.mkdir()
    model = make_model(folder.parent / "model", "tiny", "cpu", kind="qwen2", max_length=4096)
    job = spec(model, "cpu")
    job["training"] |= {"maxSteps": STEPS, "learningRate": 1e-3}
    job["storage"] = {"checkpointEverySteps": 3, "keep": 2}
    killer = Killer(folder, plan)
    shown = {"VLLM_LOGGING_LEVEL": "INFO"}  # of FORGETS; TRL, which tests of benchmarks import, sets ERROR
    rows = run_job(folder, job, STEPS, seconds=SECONDS, variables=shown, watch=killer, to_end=True)
    assert not killer.left, "the job ended before all kills"
    return rows


def test_a_job_whose_rank_is_killed_trains_as_one_whose_rank_is_not(tmp_path):
    plan = [(0, "Training"), (1, "Syncing"), (4, "Syncing"), (4, FORGETS), (6, "Saving"), (8, "Generating")]
    killed, whole = train(tmp_path / "killed", plan), train(tmp_path / "whole", [])
    assert [row["step"] for row in killed] == list(range(STEPS))
    names = ("step", "reward", "loss", "grad_norm", "num_tokens")
    assert [[row[name] for name in names] for row in killed] == [[row[name] for name in names] for row in whole]
    (log,) = (tmp_path / "killed").glob("run/*/pods/bench-e-0/launcher.log")
    text = log.read_text()
    assert text.count("engines go on, with what they have loaded") == len(plan)
    assert text.count("Starting vLLM server on") == 1, "no attempt loaded the engine again"
