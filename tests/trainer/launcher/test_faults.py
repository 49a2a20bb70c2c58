"""Asserts that faults end an attempt with a message that names the cause, and that the next one continues the run."""

import json
import signal

import pytest

from grpo_spec.reports import ExitCode
from grpo_workload.storage.journal import read_lineage
from support.trainer.launchers import World, eventually
from support.trainer.rank_server import PYTHONPATH

TRAIN = """
    from grpo_workload.rank import main as train
    sys.exit(train())
"""
DEADLINE = 300.0  # seconds; ranks load torch and DeepSpeed on a busy machine
EVERY = 2  # steps between checkpoints


class Attempts:
    """Successive attempts of one run, on pods with one rank each."""

    def __init__(self, folder, model):
        self.world = World(folder, [1, 1], TRAIN, timeout=300, forks=True)
        self.world.timing |= {"lost": 60, "rank_grace": 5, "linger": 2}
        self.run_dir = folder / "data" / "ns" / "job" / "u"
        self.order = folder / "order"
        self.attempt = -1
        self.config = {
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
            "rewards": [{"name": "slow", "function": "ordered_reward:slow", "timeoutSeconds": 3, "env": ["ORDER"]}],
            "training": {
                "maxSteps": 100_000,
                "promptsPerStep": 3,
                "numGenerations": 4,
                "maxCompletionLength": 6,
                "learningRate": 1e-3,
            },
            "parallelism": {"zeroStage": 3},
            "generation": {"engine": "Transformers"},
            "storage": {"checkpointEverySteps": EVERY, "keep": 1},
        }

    def start(self, pods=2):
        """Start the next attempt on the first `pods` pods."""
        self.attempt += 1
        changes = {
            "attempt": self.attempt,
            "durable": True,
            "config": self.config,
            "members": self.world.values["members"][:pods],
        }
        self.world.contract.write_text(json.dumps(self.world.values | changes))
        environ = {"GRPO_DATA_DIR": str(self.run_dir.parents[2]), "ORDER": str(self.order)}
        environ["PYTHONPATH"] = PYTHONPATH
        return [pod.start(f"{pod.name}-{self.attempt}", **environ) for pod in self.world.pods[:pods]]

    def steps(self):
        """Return the steps whose prompt groups are in the lineage."""
        return [groups[0].step for groups in read_lineage(self.run_dir)] if self.run_dir.exists() else []

    def saved(self):
        """Return the step of the newest checkpoint."""
        return max(int(path.name.removeprefix("step-")) for path in (self.run_dir / "checkpoints").glob("step-*"))

    def train_on(self):
        """Wait until the journal has some more steps, so that there are steps after the newest checkpoint."""
        goal = len(self.steps()) + EVERY + 1
        eventually(lambda: len(self.steps()) > goal, "more steps are taken", DEADLINE)


@pytest.fixture
def attempts(tmp_path, tiny_model):
    made = Attempts(tmp_path, tiny_model)
    yield made
    made.world.close()


def test_a_run_continues_after_each_fault_and_its_lineage_has_every_step_once(attempts):
    first, second = attempts.start()
    attempts.train_on()
    second.signal_ranks(signal.SIGKILL)
    theirs, own = first.ends(DEADLINE), second.ends(DEADLINE)
    assert (own.exit_code, own.rank) == (ExitCode.RANK_FAILED, 1)
    assert "rank 1 was killed by SIGKILL (probably out of memory" in own.message
    assert theirs.exit_code == ExitCode.PEER_LOST
    assert "pod pod-1 ended with RankFailed of rank 1" in theirs.message
    saved = attempts.saved()
    assert len(attempts.steps()) - saved <= EVERY + 1  # the last step may be journalled but not trained
    # In the next attempt rank 0 finds its groups of that step in the journal and rank 1 does not. So only rank 1 must
    # sample, although forward passes are collective under ZeRO-3.
    (attempts.run_dir / f"journal/branch-0.0-at-0/steps-{saved}/rank-1.jsonl.gz").unlink(missing_ok=True)

    first, second = attempts.start()
    eventually(lambda: second.json("/progress"), "the launcher answers", DEADLINE)
    attempts.train_on()
    attempts.order.write_text("1")
    eventually(
        lambda: second.json("/progress")["rankPhases"]["1"].startswith("Rewarding for 1"), "rank 1 hangs", DEADLINE
    )
    assert first.json("/progress")["rankPhases"]["0"].startswith("Gathering for ")
    assert 0 < first.json("/progress")["stepSeconds"] < 60
    theirs, own = first.ends(DEADLINE), second.ends(DEADLINE)
    assert (
        "rank 1 failed with exit code 1: RewardError: rewards[slow] was not done with 4 completions within 3 s"
        in own.message
    )
    assert "ended with RankFailed of rank 1" in theirs.message
    attempts.order.unlink()

    first, second = attempts.start()
    attempts.train_on()
    second.signal(signal.SIGTERM)
    assert [pod.ends(DEADLINE).exit_code for pod in (first, second)] == [ExitCode.STOPPED] * 2
    stopped_at = attempts.saved()
    assert attempts.steps() == list(range(stopped_at))

    attempts.config["training"]["maxSteps"] = stopped_at + 2
    (only,) = attempts.start(pods=1)
    assert only.ends(DEADLINE).exit_code == ExitCode.DONE
    lineage = list(read_lineage(attempts.run_dir))
    assert [groups[0].step for groups in lineage] == list(range(stopped_at + 2))
    for groups in lineage:
        assert [group.position for group in groups] == [0, 1, 2]
        assert {version for group in groups for version in group.weight_versions} == {groups[0].step}
