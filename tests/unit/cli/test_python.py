"""`Job` for notebooks, without a cluster: made of arguments, of YAML and of TRL's configuration."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from grpo_cli.documents.manifest import JobDocument, read_documents
from grpo_cli.errors import CliError
from grpo_cli.python import Job, JobFailedError
from grpo_cli.python.rows import rows_of
from grpo_cli.ui.history import KEPT_COMPLETIONS, History
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
    with pytest.warns(UserWarning, match="use_dora = True is not taken over: DoRA is not supported") as warned:
        job = Job.from_trl(config, **given)
    assert warned[0].filename == __file__, "the line that calls from_trl"
    assert job.name == "model"
    assert "\n# " in job.to_yaml()
    assert read_documents(job.to_yaml(), "text") == job._documents
    training = job.spec.training
    assert (training.learning_rate, training.max_steps, training.num_generations) == (2e-5, 20, 4)
    assert (training.lr_scheduler_type, job.spec.rewards[0].function) == ("cosine", "mine:right")
    assert job.spec.trainer.groups[0].gpus == 2
    assert Job.from_trl(SimpleNamespace(max_steps=20, _n_gpu=3), **given).spec.training.max_steps == 20
    with pytest.raises(ValueError, match=r"lambda.* is in no module: write it"):
        Job.from_trl(config, **given | {"rewards": [lambda completions: completions]})
    assert Job.from_trl(config, **given | {"rewards": "mine:right"}).spec == job.spec
    with pytest.raises(ValueError, match="rewards: name at least one"):
        Job.from_trl(config, **given | {"rewards": []})
    for wrong in ({"max_steps": 20}, Config, object()):
        with pytest.raises(ValueError, match="config has no options as its attributes"):
            Job.from_trl(wrong, **given)


def test_completions_that_a_history_leaves_out_are_warned_of() -> None:
    history = History()
    history.add({"completions": [{"step": step} for step in range(KEPT_COMPLETIONS)]})
    assert rows_of(history, "completions") == history.completions
    history.add({"completions": [{"step": KEPT_COMPLETIONS}] * 2})
    with pytest.warns(UserWarning, match=f"the newest {KEPT_COMPLETIONS} completions: 2 older ones"):
        assert rows_of(history, "completions")[0] == {"step": 2}


def test_a_run_that_fails_says_why_and_keeps_what_it_printed(tmp_path: Path) -> None:
    said: list[str] = []
    job = Job("bad", **spec(model={"path": str(tmp_path / "none")}, trainer={"groups": [{"name": "a", "gpus": 1}]}))
    with pytest.raises(JobFailedError, match="job bad ended with"):
        job.run(tmp_path, show=said.append)
    assert said[0].startswith("1 pod, 1 rank")
    with pytest.raises(CliError, match="exported no model"):
        job.export(tmp_path / "model")
    assert len(job.metrics()) == 0
    with pytest.raises(TimeoutError, match="timeout 0 s has passed"):
        job.run(tmp_path / "again", timeout=0.3, show=said.append)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(tmp_path / "interrupted", timeout=3600, show=interrupt)
    assert not [one for one in threading.enumerate() if isinstance(one, threading.Timer) and one.is_alive()]
    with pytest.raises(CliError, match="interrupted"):
        job.export(tmp_path / "model")


def test_texts_that_look_like_other_values_reach_the_manifest_as_texts() -> None:
    job = Job("math", **spec(podTemplate={"env": [{"name": "COMMIT", "value": "12e03"}, {"name": "y", "value": "n"}]}))
    (read,) = read_documents(job.to_yaml(), "job.yaml")
    assert isinstance(read, JobDocument)
    assert read.spec == job.spec


class Api(BaseHTTPRequestHandler):
    """An API server that takes everything."""

    applied: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        kind = {"name": "persistentvolumeclaims", "namespaced": True, "kind": CLAIM["kind"]}
        self._answer(200, {"resources": [kind]})

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.applied.append(self.path.partition("?")[0])
        self._answer(201, {})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def test_documents_go_to_the_namespaces_that_grpo_submit_sends_them_to(tmp_path: Path) -> None:
    document = yaml.safe_load(Job("math", **spec()).to_yaml())
    document["metadata"]["namespace"] = "prod"
    (file := tmp_path / "job.yaml").write_text(yaml.safe_dump_all([CLAIM, document]))
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        named = {"kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}]}
        named["clusters"] = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
        named["contexts"] = [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}]
        (config := tmp_path / "config").write_text(yaml.safe_dump(named))
        for what in ("submit", "wait", "metrics"):
            with pytest.raises(CliError, match="job math is of namespace prod, and namespace is dev: leave one out"):
                getattr(Job.from_yaml(file, kubeconfig=str(config), namespace="dev"), what)()
        assert not Api.applied
        said: list[str] = []
        Job.from_yaml(file, kubeconfig=str(config)).submit(show=said.append)
        server.shutdown()
    assert said == ["PersistentVolumeClaim team/data created", "job prod/math created"]
    applied = [one.split("/namespaces/")[1] for one in Api.applied]
    assert applied == ["team/persistentvolumeclaims/data", "prod/grpojobs/math"]
