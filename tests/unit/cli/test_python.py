"""`Job` for notebooks, without a cluster: made of arguments, of YAML and of TRL's configuration."""

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_cli.errors import CliError
from grpo_cli.python import Job, JobFailedError
from grpo_spec.training import TrainingConfig
from support.control_plane.jobs import spec

CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}}


def test_it_imports_no_torch() -> None:
    code = "import sys, grpo_cli.python, grpo_cli.convert.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_sections_are_models_or_mappings_and_what_nobody_set_is_not_written(tmp_path: Path) -> None:
    fields = spec(training=TrainingConfig(max_steps=5), pod_template={"env": [{"name": "A", "value": "b"}]})
    job = Job("math", **fields)
    assert (job.name, job.spec.training.max_steps) == ("math", 5)
    written = yaml.safe_load(job.to_yaml())
    assert written["spec"]["training"] == {"maxSteps": 5}
    assert written["spec"]["podTemplate"] == {"env": [{"name": "A", "value": "b"}]}

    (file := tmp_path / "job.yaml").write_text(yaml.safe_dump_all([CLAIM, written]))
    again = Job.from_yaml(file)
    assert again.spec == job.spec
    assert list(yaml.safe_load_all(again.to_yaml())) == [CLAIM, written]
    with pytest.raises(ValueError, match=r"job math: spec.training.max_step: unknown field; did you mean maxSteps\?"):
        Job("math", **spec(training={"max_step": 5}))


class Schedule(Enum):
    COSINE = "cosine"


@dataclass
class Config:
    """As TRL's: with values that it derives."""

    learning_rate: float = 1e-6
    max_steps: int = -1
    num_generations: int = 8
    lr_scheduler_type: Any = "linear"
    generation_batch_size: int | None = None
    use_dora: bool = False
    report_to: Any = "none"
    debug: list[str] = field(default_factory=list)


def test_a_configuration_of_trl_becomes_a_job_and_what_has_no_place_is_warned_of() -> None:
    config = Config(2e-5, 20, 4, Schedule.COSINE, generation_batch_size=7, use_dora=True, report_to=[])
    given: dict[str, Any] = {"model": "org/model", "dataset": "org/data", "rewards": ["mine:right"], "gpus": 2}
    with pytest.warns(UserWarning, match="use_dora = True is not taken over: DoRA is not supported"):
        job = Job.from_trl(config, **given)
    assert job.name == "model"
    training = job.spec.training
    assert (training.learning_rate, training.max_steps, training.num_generations) == (2e-5, 20, 4)
    assert (training.lr_scheduler_type, job.spec.rewards[0].function) == ("cosine", "mine:right")
    assert job.spec.trainer.groups[0].gpus == 2
    assert Job.from_trl(SimpleNamespace(max_steps=20, _n_gpu=3), **given).spec.training.max_steps == 20
    with pytest.raises(ValueError, match=r"lambda.* is in no module: write it"):
        Job.from_trl(config, **given | {"rewards": [lambda completions: completions]})


def test_a_run_that_fails_says_why_and_keeps_what_it_printed(tmp_path: Path) -> None:
    said: list[str] = []
    job = Job("bad", **spec(model={"path": str(tmp_path / "none")}, trainer={"groups": [{"name": "a", "gpus": 1}]}))
    with pytest.raises(JobFailedError, match="job bad ended with"):
        job.run(tmp_path, show=said.append)
    assert said[0].startswith("1 pods, 1 ranks")
    with pytest.raises(CliError, match="exported no model"):
        job.export(tmp_path / "model")
    assert len(job.metrics()) == 0
    with pytest.raises(TimeoutError, match="timeout 0 s has passed"):
        job.run(tmp_path / "again", timeout=0.3, show=said.append)
