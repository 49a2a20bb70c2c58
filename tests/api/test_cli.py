"""`grpo` with a real API server and a running operator: jobs are submitted, watched, explained, suspended and
diagnosed.

The nodes are fake: the tests write what kubelets would report.
"""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from grpo_cli.errors import CliError
from grpo_cli.main import main
from grpo_cli.python import Job, JobFailedError
from support.control_plane.operators import Jobs, bind_claim, make_job, outcome

Grpo = Callable[..., Result]
ONCE = {"maxRestarts": 0}
SECRET = "hf_" + "Pl4ntedS3cretT0ken99"


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., str]:
    """A manifest file of a small job."""

    def write(name: str, **spec: object) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(make_job(name, **spec)))
        return str(path)

    return write


def one_line(result: Result, code: int) -> str:
    """Return the error of a command that failed with this exit code, which must be one line without a traceback."""
    assert result.exit_code == code
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.output
    assert result.stderr.splitlines()[-1] == lines[0]
    assert "Traceback" not in result.output
    return lines[0]


def test_a_job_is_submitted_listed_and_changed(grpo: Grpo, jobs: Jobs, manifest: Callable[..., str]) -> None:
    assert grpo("list").output == f"no jobs in namespace {jobs.namespace}\n"
    assert grpo("submit", manifest("first")).stderr == f"job {jobs.namespace}/first created\n"
    jobs.wait_for("first", "Running", "True")
    again = grpo("submit", manifest("first", activeDeadlineSeconds=900))
    assert (again.exit_code, again.stderr) == (0, f"job {jobs.namespace}/first applied\n")
    assert jobs.get("grpo", "first")["spec"]["activeDeadlineSeconds"] == 900

    header, line = grpo("list").stdout.splitlines()

    assert header.split() == ["NAME", "PHASE", "STEP", "REWARD", "TRAINER", "RESTARTS", "AGE", "WHY"]
    assert line.split()[:6] == ["first", "Running", "-", "-", "2/2", "0"]
    assert jobs.namespace in grpo("list", "-A").stdout
    written = json.loads(jobs("get", "grpo", "first", "-o", "json", "--show-managed-fields"))["metadata"]
    assert {field["manager"] for field in written["managedFields"]} == {"grpo-cli", "grpo-operator"}


def test_all_documents_of_a_file_are_sent_and_a_refused_one_is_named(grpo: Grpo, jobs: Jobs, tmp_path: Path) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "brought"}, "spec": spec}
    odd = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "odd"}, "spec": {"replica": 1}}
    (path := tmp_path / "all.yaml").write_text(yaml.safe_dump_all([claim, make_job("whole")]))
    space = jobs.namespace
    sent = grpo("submit", str(path))
    assert sent.stderr == f"PersistentVolumeClaim {space}/brought created\njob {space}/whole created\n"
    assert jobs.get("pvc", "brought")["spec"]["accessModes"] == ["ReadWriteOnce"]

    path.write_text(yaml.safe_dump_all([claim, odd, make_job("never")]))
    assert "all.yaml: document 2 of 3: Deployment odd: " in one_line(refused := grpo("submit", str(path)), 2)
    assert ".spec.replica: field not declared in schema" in refused.stderr
    path.write_text(yaml.safe_dump_all([odd | {"kind": "Deploymint"}, make_job("never")]))
    unknown = "document 1 of 2: Deploymint odd: this cluster has no Deploymint of apps/v1"
    assert unknown in one_line(grpo("submit", str(path)), 4)
    assert "never" not in grpo("list").stdout


def test_a_wrong_manifest_is_refused_before_it_is_sent_or_by_the_server(
    grpo: Grpo, jobs: Jobs, manifest: Callable[..., str]
) -> None:
    wrong = grpo("submit", manifest("wrong", trainer={"groups": [{"name": "a", "gpus": 0}]}))
    assert "spec.trainer.groups[0].gpus: Input should be greater than or equal to 1 (found 0)" in one_line(wrong, 2)
    assert grpo("submit", "/nowhere.yaml").exit_code == 2

    grpo("submit", manifest("fixed"))
    jobs.wait_for("fixed", "Running", "True")
    moved = grpo("submit", manifest("fixed", model={"name": "other"}))
    assert "the API server refuses the request" in one_line(moved, 2)

    jobs.apply(make_job("theirs", activeDeadlineSeconds=900))
    taken = grpo("submit", manifest("theirs", activeDeadlineSeconds=1000))
    assert "--force-conflicts" in one_line(taken, 2)
    assert grpo("submit", manifest("theirs", activeDeadlineSeconds=1000), "--force-conflicts").exit_code == 0


def test_waiting_ends_with_the_job_and_with_its_exit_code(grpo: Grpo, jobs: Jobs, manifest: Callable[..., str]) -> None:
    late = grpo("submit", manifest("works"), "--wait", "--timeout", "0")
    assert "--timeout 0 s has passed" in one_line(late, 124)
    jobs.wait_for("works", "Running", "True")
    progress = {"step": 5, "totalSteps": 5, "reward": 0.75}
    jobs.succeed("works-b-0")
    jobs.finish_pod("works-a-0", 0, outcome(0, progress=progress))
    done = grpo("watch", "works", "--timeout", "30")
    assert done.exit_code == 0
    assert "Succeeded  step 5/5  reward 0.750" in done.stdout

    refused = grpo("submit", manifest("stored", claim="nothing"), "--wait", "--timeout", "30")
    assert "has no PersistentVolumeClaim nothing" in one_line(refused, 2)
    assert "create the PersistentVolumeClaim" in one_line(refused, 2)


def test_python_submits_a_job_and_waits_for_it(jobs: Jobs, kubeconfig: Path, capsys: pytest.CaptureFixture) -> None:
    where = {"kubeconfig": str(kubeconfig), "namespace": jobs.namespace}
    job = Job("python", **where, **make_job("python", failurePolicy=ONCE)["spec"]).submit()
    assert capsys.readouterr().out == f"job {jobs.namespace}/python created\n"
    with pytest.raises(TimeoutError, match="timeout 0 s has passed; the job continues"):
        job.wait(timeout=0)
    again = Job.from_cluster("python", **where)
    assert again.spec == job.spec
    jobs.wait_for("python", "Running", "True")
    with pytest.raises(CliError, match="job python has exported no model"):
        again.export("nowhere")
    jobs.finish_pod("python-a-0", 10, outcome(10))
    with pytest.raises(JobFailedError, match="job python is Failed: "):
        job.wait(timeout=60)


def test_a_failed_job_is_explained_on_one_screen(grpo: Grpo, jobs: Jobs) -> None:
    jobs.run("broken", failurePolicy=ONCE)
    said = "rank 2: ValueError: bad batch\n" + "\n".join(f"frame {number}" for number in range(9))
    jobs.finish_pod("broken-b-0", 70, outcome(70, "RankFailed", said, rank=2))
    jobs.wait_for("broken", "Failed", "True")

    shown = grpo("status", "broken")

    assert shown.exit_code == 0
    assert f"{jobs.namespace}/broken  Failed (RankFailed)" in shown.stdout
    assert "RankFailed of broken-b-0, see below; failurePolicy.maxRestarts is 0" in shown.stdout
    assert "frame 8" in shown.stdout
    assert "read the message and the end of the log lines" in shown.stdout
    ended = grpo("watch", "broken")
    assert "rank 2: ValueError: bad batch" in one_line(ended, 1)
    assert grpo("suspend", "broken").exit_code == 2


def test_a_job_is_suspended_and_resumed(grpo: Grpo, jobs: Jobs, manifest: Callable[..., str]) -> None:
    grpo("submit", manifest("pause"))
    jobs.wait_for("pause", "Running", "True")
    assert grpo("suspend", "pause").exit_code == 0
    jobs.wait_for("pause", "Suspended", "True", "Suspended")
    assert "Suspended" in grpo("status", "pause").stdout
    assert "is already suspended" in grpo("suspend", "pause").stderr
    assert grpo("resume", "pause").exit_code == 0
    jobs.wait_for("pause", "Running", "True")


def test_a_name_that_does_not_exist_is_answered_with_names_that_do(grpo: Grpo, jobs: Jobs, kubeconfig: Path) -> None:
    jobs.apply(make_job("math-large"))
    typo = grpo("status", "math-larg")
    assert "did you mean math-large?" in one_line(typo, 4)
    elsewhere = CliRunner().invoke(main, ["status", "math-large", "--kubeconfig", str(kubeconfig)])
    assert f"there is one in {jobs.namespace}: use --namespace" in one_line(elsewhere, 4)
    assert "it has 0-2" in one_line(grpo("logs", "math-large", "--rank", "3"), 4)
    jobs.wait_for("math-large", "Running", "True")
    silent = grpo("logs", "math-large")
    assert silent.exit_code == 4
    assert "math-large-a-0: no log: " in silent.stderr
    assert "curve           unknown: no connection to pod math-large-a-0" in grpo("status", "math-large").stdout


def test_a_cluster_that_does_not_answer_or_refuses_is_reported_in_one_line(
    jobs: Jobs, kubeconfig: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load(kubeconfig.read_text())

    def list_with(change: Callable[[dict], None]) -> Result:
        changed = json.loads(json.dumps(config))
        change(changed)
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(changed))
        return CliRunner().invoke(main, ["list", "--kubeconfig", str(path), "--namespace", jobs.namespace])

    away = list_with(lambda c: c["clusters"][0]["cluster"].update(server="https://127.0.0.1:1"))
    assert "the API server does not answer: " in one_line(away, 3)
    assert "Connection refused" in one_line(away, 3)
    token = jobs.kubectl("create", "token", "default", "-n", jobs.namespace).strip()
    forbidden = list_with(lambda c: c.update(users=[{"name": c["users"][0]["name"], "user": {"token": token}}]))
    assert "cannot list resource" in one_line(forbidden, 3)
    unknown = list_with(lambda c: c.update(users=[{"name": c["users"][0]["name"], "user": {"token": "x"}}]))
    assert "log in to the cluster again" in one_line(unknown, 3)
    nothing = CliRunner().invoke(main, ["list", "--kubeconfig", str(tmp_path / "none")])
    assert "no usable kubeconfig" in one_line(nothing, 3)


def _bug_report(grpo: Grpo, job: str, folder: Path) -> dict[str, str]:
    """Return the files of a job's bug report, by name."""
    archive = folder / "report.tar.gz"
    written = grpo("diagnose", job, "--output", str(archive))
    assert written.exit_code == 0, written.output
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            files[member.name.removeprefix("report/")] = file.read().decode()
    return files


def test_a_bug_report_holds_the_download_that_the_job_waits_for(grpo: Grpo, jobs: Jobs, tmp_path: Path) -> None:
    bind_claim(jobs, "models")
    jobs.apply(make_job("fetching", cache={"claimName": "models", "prefetch": True}))
    jobs.wait_for("fetching", "Scheduled", "False", "Downloading")
    (job,) = yaml.safe_load(_bug_report(grpo, "fetching", tmp_path)["children/Job.yaml"])
    assert job["metadata"]["labels"]["training.grpo.dev/job"] == "fetching"


def test_a_bug_report_holds_everything_but_secrets(grpo: Grpo, jobs: Jobs, tmp_path: Path) -> None:
    env = [{"name": "HF_TOKEN", "value": SECRET}, {"name": "HARMLESS", "value": "swordfish"}]
    jobs.run("secretive", podTemplate={"env": env, "annotations": {"note": f"see {SECRET}"}}, failurePolicy=ONCE)
    jobs.finish_pod("secretive-b-0", 70, outcome(70, "RankFailed", f"rank 2: 401 for {SECRET}"))
    jobs.wait_for("secretive", "Failed", "True")
    files = _bug_report(grpo, "secretive", tmp_path)
    assert {"job.yaml", "nodes.yaml"} <= files.keys()
    assert "HF_TOKEN" in files["children/StatefulSet.yaml"]
    assert "contract.json" in files["children/ConfigMap.yaml"]
    assert "RankFailed" in files["events.txt"]
    assert yaml.safe_load(files["versions.yaml"])["kubernetes"].startswith("v1.")
    assert "Failed (RankFailed)" in files["status.txt"]
    for name, text in files.items():
        assert SECRET not in text, name
        assert "swordfish" not in text, name


def test_names_of_jobs_are_completed_from_the_cluster(jobs: Jobs, kubeconfig: Path) -> None:
    jobs.apply(make_job("math-small"))
    assert "_GRPO_COMPLETE" in CliRunner().invoke(main, ["completion", "bash"]).output
    where = f"--kubeconfig {kubeconfig} -n {jobs.namespace}"
    for words in (f"grpo status {where} ma", f"grpo {where} status ma"):
        asked = {"_GRPO_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        assert CliRunner(env=asked).invoke(main, prog_name="grpo").output == "plain,math-small\n"
