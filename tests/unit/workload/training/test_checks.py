"""Checks that only ranks can make: all of them read the same rows, and another run's checkpoint leaves steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_operator.layout.contracts import make_contract
from grpo_spec.errors import ConfigError
from grpo_workload.data.origin import DataOrigin
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.resuming import Source
from grpo_workload.training.checks import check_rows, check_steps_left
from support.control_plane.jobs import world


def test_ranks_that_find_other_rows_are_named_with_their_pods():
    groups = [{"name": "a", "gpus": 2}, {"name": "b", "replicas": 2, "gpus": 1}]
    contract = make_contract(*world(trainer={"groups": groups}), 0)
    same = DataOrigin(source="/data/rows.jsonl", commit=None, rows=2, fingerprint="a,b")
    other = replace(same, rows=1, fingerprint="x")
    check_rows("dataset.path", [same] * 4, contract)
    with pytest.raises(ConfigError) as refusal:
        check_rows("dataset.path", [same, same, other, replace(same, fingerprint="y")], contract)
    pods = [member.pod for member in contract.members]
    assert str(refusal.value) == (
        f"dataset.path: ranks find other rows in /data/rows.jsonl than rank 0 (pod {pods[0]}): rank 2 (pod {pods[1]}): "
        f"1 row instead of 2, fingerprint x instead of a,b; rank 3 (pod {pods[2]}): fingerprint y instead of a,b. "
        "Every trainer pod must read the same files, and nothing may write to them while the job starts"
    )


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_checkpoint_after_which_no_step_is_left_is_refused_unless_it_is_the_jobs_own(step, is_own):
    state = SavedState(step=step, weight_version=step, num_tokens=0, world_size=1, zero_stage=2)
    source = Source(checkpoint=Path(), state=state, folder=Path(), is_universal=False, is_own=is_own)
    if is_own or step < 2:
        check_steps_left(source, 2)
        return
    with pytest.raises(ConfigError, match=rf"^training.maxSteps: 2 steps leave none .* was saved after step {step}, "):
        check_steps_left(source, 2)
