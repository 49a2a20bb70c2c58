"""What goes wrong while a run trains: each fault ends it with a message that names the cause, and the next attempt goes on."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from launcher import World, eventually

from grpo_workload.contract import ExitCode
from grpo_workload.journal import read_lineage

PROGRAMS = Path(__file__).parent / "programs"
TRAIN = """
    from grpo_workload.train import main as train
    sys.exit(train())
"""
DEADLINE = 300.0  # for ranks that load torch and DeepSpeed on a busy machine
EVERY = 2  # steps between checkpoints


def test_rewards_and_prompts_that_go_wrong_are_named_and_journalled_groups_are_used_again(run_program, tiny_model, tmp_path):
    run_program("faults.py", 1, tiny_model, tmp_path)


class Attempts:
    """Attempts at one run, an epoch each, on pods with one rank each."""

    def __init__(self, folder, model):
        self.world = World(folder, [1, 1], TRAIN, timeout=300)
        self.world.timing |= {"lost": 60, "rank_grace": 5, "linger": 2}
        self.run_dir = folder / "data" / "ns" / "job" / "u"
        self.order = folder / "order"
        self.epoch = -1
        self.config = {
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
            "rewards": [{"name": "told", "function": "told_reward:told", "timeoutSeconds": 3, "env": ["TOLD"]}],
            "training": {"maxSteps": 100_000, "promptsPerStep": 3, "numGenerations": 4, "maxCompletionLength": 6, "learningRate": 1e-3},
            "parallelism": {"zeroStage": 3},
            "generation": {"engine": "Transformers"},
            "storage": {"checkpointEverySteps": EVERY, "keep": 1},
        }

    def start(self, pods=2):
        """Start the next epoch on the first `pods` pods."""
        self.epoch += 1
        changes = {"epoch": self.epoch, "durable": True, "config": self.config, "members": self.world.values["members"][:pods]}
        self.world.contract.write_text(json.dumps(self.world.values | changes))
        environ = {"GRPO_DATA_DIR": str(self.run_dir.parents[2]), "TOLD": str(self.order)}
        environ["PYTHONPATH"] = os.pathsep.join([str(PROGRAMS), *sys.path])
        return [pod.start(f"{pod.name}-{self.epoch}", **environ) for pod in self.world.pods[:pods]]

    def steps(self):
        """Steps whose groups are in the lineage."""
        return [groups[0].step for groups in read_lineage(self.run_dir)] if self.run_dir.exists() else []

    def saved(self):
        """Step of the newest checkpoint."""
        return max(int(path.name.removeprefix("step-")) for path in (self.run_dir / "checkpoints").glob("step-*"))

    def train_on(self):
        """Wait until some more steps are taken, and the last checkpoint is not that of the last one."""
        goal = len(self.steps()) + EVERY + 1
        eventually(lambda: len(self.steps()) > goal, "steps are taken", DEADLINE)


@pytest.fixture
def attempts(tmp_path, tiny_model):
    made = Attempts(tmp_path, tiny_model)
    yield made
    made.world.close()


def test_a_run_survives_what_ends_its_attempts_and_its_lineage_has_every_step_once(attempts):
    first, second = attempts.start()
    attempts.train_on()
    second.signal_ranks(signal.SIGKILL)
    theirs, own = first.ends(DEADLINE), second.ends(DEADLINE)
    assert (own.exit_code, own.rank) == (ExitCode.RANK_FAILED, 1)
    assert "rank 1 was killed by SIGKILL (probably out of memory" in own.message
    assert theirs.exit_code == ExitCode.PEER_LOST
    assert "pod pod-1 ended with RankFailed: rank 1 was killed by SIGKILL" in theirs.message
    saved = attempts.saved()
    assert len(attempts.steps()) - saved <= EVERY + 1  # the last step may be journalled and not taken
    # Rank 0 finds all its groups of that step, rank 1 none: it samples, with forwards that are collective under ZeRO-3.
    (attempts.run_dir / f"journal/branch-0.0-at-0/steps-{saved}/rank-1.jsonl.gz").unlink(missing_ok=True)

    first, second = attempts.start()
    eventually(lambda: second.json("/progress"), "the launcher answers", DEADLINE)
    attempts.train_on()
    attempts.order.write_text("1")
    eventually(lambda: second.json("/progress")["rankPhases"]["1"].startswith("Rewarding for 1"), "rank 1 hangs", DEADLINE)
    assert first.json("/progress")["rankPhases"]["0"].startswith("Gathering for ")
    assert 0 < first.json("/progress")["stepSeconds"] < 60
    theirs, own = first.ends(DEADLINE), second.ends(DEADLINE)
    assert "rank 1 failed with exit code 1: RewardError: rewards[told] was not done with 4 completions within 3 s" in own.message
    assert "rewards[told] was not done" in theirs.message
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
